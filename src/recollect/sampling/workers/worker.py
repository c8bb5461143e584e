"""A worker of MultiprocessingSampler: draws or gathers what is asked for, into slots of a ring, until told to end."""

from __future__ import annotations

import os
import pickle
import random
import select
import signal
import sys
import threading
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import Any

import numpy as np

from recollect import _core, interrupts
from recollect.batch.boundaries import CONTENTION_S
from recollect.batch.to_backend import ToBackendOrDeviceBatch
from recollect.batch.walk import Found, Walk
from recollect.errors import EmptyError
from recollect.memory.ring import TIMEOUT, Ring
from recollect.sampling.base import BatchSampler
from recollect.sampling.stream import mix
from recollect.sampling.workers import messages as requests
from recollect.sampling.workers.messages import DRAW, REST, WorkRequest
from recollect.sampling.workers.slots import DATA, EMPTY, ERROR, GONE, Format
from recollect.system.processes import die_with_parent, end_descriptor
from recollect.text import told

LOOK_S = 0.5  # a wait is that long at most before it starts again; nothing depends on it


def run(payload: Any, form: Format, out: Ring, asked: Ring, parent: int, doze_s: float, dies: bool) -> None:
    """The whole life of a worker process. `payload` is the sampler, or its pickle; `parent` the parent's word."""
    interrupts.drop_held_back()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _watch(parent, doze_s, dies)
    worker = Worker(form, out, asked)
    try:
        worker.prepare(pickle.loads(payload) if isinstance(payload, bytes) else payload)
        worker.loop()
    except BaseException as error:
        worker.report(told(error))
    out.close()
    asked.close()


class Worker:
    """The state of a worker between two batches."""

    def __init__(self, form: Format, out: Ring, asked: Ring) -> None:
        self.form, self.out, self.asked = form, out, asked
        self.native, self.lane = out.native, out.lane or 0
        self.request = WorkRequest(REST, 0)
        self.queue: deque[WorkRequest] = deque()

    def prepare(self, sampler: BatchSampler) -> None:
        """Make the sampler this process's own: one thread, its own turn, no moving to devices."""
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # several processes share the cores; and a forked thread pool is dead
        sampler._lock()
        data = sampler.batch
        while isinstance(data, ToBackendOrDeviceBatch):  # the parent does the last step
            data = data.batch
        if data is not sampler.batch:
            sampler._bind(data, None)
        sampler._unlimit()  # the parent counts what it hands out
        self.sampler = sampler
        self.seeded = sampler._transformations("manual_seed")
        self.own_seed = type(sampler)._seed is not BatchSampler._seed
        slots = range(self.lane * self.out.num_slots, (self.lane + 1) * self.out.num_slots)
        self.views = {slot: self.out.slot_views(slot) for slot in slots}
        in_place = sampler.batch.backend.name == "numpy"
        self.blocks = {s: self.form.data.nested(v) if in_place else None for s, v in self.views.items()}
        self.rows = sampler._drawn_rows()
        self.slots = self.form.data.blocks(self.out)

    def loop(self) -> None:
        """Serve requests until the rings are closed."""
        ready, claim = self.asked.native.n_ready, self.native.claim
        while True:
            if (self.request.kind == REST or ready(0)) and not self._next_request():
                return
            slot = claim(self.lane, LOOK_S)
            if slot == TIMEOUT:
                continue
            if slot < 0:
                return
            if ready(0):
                continue  # another request came while this one waited for a slot; the slot stays claimed
            if self.request.kind != DRAW or self.request.metadata or self.blocks[slot] is None:
                self._fill(slot)
            elif self.rows is not None:
                self._draw_rows(*self.rows)
            else:
                self._draw_on(slot)

    def _next_request(self) -> bool:
        """Choose what to do next, waiting for a request if there is none; False when there will be none any more."""
        native = self.asked.native
        while native.n_ready(0) or (self.request.kind == REST and not self.queue):
            outcome = native.take(-1, LOOK_S)
            if outcome == TIMEOUT:
                continue
            if outcome < 0:
                return False
            request = requests.read(self.asked.take(0.0))
            self.asked.release()
            if any(old.run != request.run for old in (*self.queue, self.request)):
                self.queue.clear()  # a new run: what was asked for before is not wanted any more
                self.request = WorkRequest(REST, request.run)
            if request.kind != REST:
                self.queue.append(request)
        if self.request.kind == REST and self.queue:
            self.request = self.queue.popleft()
            if self.request.kind == DRAW and self.request.number == 0:
                _seed_others(self.request.key)
        return True

    def _draw_rows(self, rows: _core.Rows, codec: _core.Codec) -> None:
        """Do what `_draw_on` does where a batch is nothing but rows of a buffer: in the core, one call for many."""
        r = self.request
        number, is_empty = self.native.draw_ahead(
            self.lane, LOOK_S, self.asked.native, self.slots, rows, codec, r.key, r.run, r.number
        )
        self.request = WorkRequest(DRAW, r.run, r.key, number)
        if is_empty:
            self.native.commit(self.lane, (r.run, EMPTY, 0, number))
            self.request = WorkRequest(REST, r.run)

    def _draw_on(self, slot: int) -> None:
        """Draw into slot after slot, until there is something else to do: the hot path, everything bound."""
        request, blocks = self.request, self.blocks
        ready, claim, commit, lane = (
            self.asked.native.n_ready,
            self.native.claim,
            self.native.commit,
            self.lane,
        )
        restart, sample, n = self._restart, self.sampler.sample, self.sampler.batch_size
        run, key, number = request.run, request.key, request.number
        try:
            while slot >= 0 and not ready(0):
                restart(key, number)
                sample(out=blocks[slot])
                commit(lane, (run, DATA, n, number))
                number += 1
                slot = claim(lane, LOOK_S)
        except EmptyError:
            commit(lane, (run, EMPTY, 0, number))
            self.request = WorkRequest(REST, run)
        else:
            self.request = WorkRequest(DRAW, run, key, number)

    def _fill(self, slot: int) -> None:
        request = self.request
        self._restart(request.key, request.number)
        try:
            n, kind = self._write(slot, request), DATA
        except EmptyError:
            n, kind = 0, EMPTY
        if n < 0:
            n, kind = 0, GONE
        self.native.commit(self.lane, (request.run, kind, n, request.number))
        if request.kind == DRAW and kind == DATA:
            self.request = WorkRequest(DRAW, request.run, request.key, request.number + 1, request.metadata)
        else:
            self.request = WorkRequest(REST, request.run)

    def _write(self, slot: int, request: WorkRequest) -> int:
        """Write one batch into a slot; how many samples it has, -1 if one of those asked for is gone."""
        if request.kind == DRAW and not request.metadata:
            return self.form.data.write(self.sampler.sample(), self.views[slot])
        found: Found | None
        if request.kind == DRAW:
            found = self.sampler.sample_with_metadata()
        else:
            found = self._gather(request)
        if found is None:
            return -1
        data, metadata = found
        n = self.form.data.write(data, self.views[slot])
        if request.metadata and self.form.metadata is not None:
            self.form.metadata.write(metadata, self.views[slot])
        return n

    def _gather(self, request: WorkRequest) -> Found | None:
        places = request.places or {}
        walk = Walk.restore(self.sampler._epoch_batch, places)
        at = np.arange(len(places["index"]))
        end = monotonic() + CONTENTION_S
        while True:
            found = walk.read(at, False, request.metadata)
            if found is not None or not walk.current(at).all():
                return found
            if monotonic() > end:
                raise self.sampler.batch._contention()

    def _restart(self, key: int, number: int) -> None:
        """Make what is random in the next batch a function of (key, number), whatever was drawn before."""
        sampler = self.sampler
        if self.own_seed:
            sampler._seed(mix(key ^ mix(number)))
            return
        sampler._stream.key, sampler._stream.counter = key, number << 32
        sampler._rng, sampler._rng_seed = None, key ^ number
        if self.seeded:
            seed = mix(key ^ mix(number))
            for k, transformation in enumerate(self.seeded):
                transformation.manual_seed(mix(seed + k + 1) >> 1)

    def report(self, text: str) -> None:
        """Send a traceback in place of the batch; its end, if it is long."""
        message = text.encode()[-self.out.slot_nbytes :]
        with suppress(Exception):  # the parent is gone or has closed: nobody to tell
            slot = self.out.claim_slot(60.0)
            raw = self.out.slot_bytes(slot)
            raw[: len(message)] = np.frombuffer(message, np.uint8)
            self.native.commit(self.lane, (self.request.run, ERROR, len(message), self.request.number))


def _seed_others(key: int) -> None:
    """Forked workers would all draw the same from generators that nobody else seeds."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002
    if torch := sys.modules.get("torch"):
        torch.manual_seed(key >> 1)


def _watch(parent: int, doze_s: float, dies: bool) -> None:
    """End this process when the parent does, even in the middle of a batch."""
    if dies:  # only where the thread that started us is sure to live as long as its process
        die_with_parent()

    def wait() -> None:
        poll, pause_s = select.poll(), doze_s
        with suppress(OSError):  # an old kernel: look again and again
            # Elsewhere its number would be another process's.
            fd = end_descriptor(_core.pid_of(parent)) if _core.is_near(parent) else None
            if fd is not None:
                poll.register(fd, select.POLLIN)
                pause_s = 1.0  # told at once
        while not _core.is_dead(parent) and not poll.poll(pause_s * 1000):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="recollect-parent", daemon=True).start()
