"""What a pipeline tells: slices, counters, one line and one csv row for each tick."""

from __future__ import annotations

import csv
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.ipc.replay_pipelines.make import N, add, buffer, pipeline

from recollect.ipc.replay_pipelines import make_collector_pack, serve_pack_requests
from recollect.observe import TraceRecorder
from recollect.testing import FakeDevice

COLUMNS = [
    "tick_id", "snapshot_ptr", "snapshot_size", "sample_seed", "sample_count", "batch_host_slot", "batch_gpu_slot",
    "redrawn", "pack_us", "copy_us", "wait_us",
]  # fmt: skip


class Recorder:
    def __init__(self) -> None:
        self.slices: list[tuple[Any, ...]] = []
        self.counters: list[tuple[Any, ...]] = []
        self.spans: list[tuple[Any, ...]] = []

    def add_slice(self, *args: Any) -> None:
        self.slices.append(args)

    def add_counter(self, *args: Any) -> None:
        self.counters.append(args)

    def add_cuda_pending_span(self, *args: Any) -> None:
        self.spans.append(args)


def names(recorder: Recorder) -> set[str]:
    return {s[0].removeprefix("replay_pipeline/") for s in recorder.slices}


@pytest.mark.parametrize("events", [True, False])
def test_slices_on_a_device(events: bool) -> None:
    recorder = Recorder()
    device = FakeDevice(1)
    with (
        buffer(40) as buf,
        pipeline(
            buf, device="fake", transfer=device, trace_recorder=recorder, trace_cuda_events=events
        ) as pipe,
    ):
        for t in range(3):
            pipe.sample_large_batch(t, N)
            pipe.start_prepare(t + 1, N)
            pipe.wait_until_ready(t + 1, N)
            pipe.after_tick()
    assert names(recorder) == {
        "pack", "batch_h2d_submit", "batch_h2d_wait", "gpu_wait_for_batch", "hot_cold_swap",
    }  # fmt: skip
    assert all(c == "replay_pipeline" and start < end for _, c, start, end, _ in recorder.slices)
    assert [c[0] for c in recorder.counters] == ["replay_pipeline/misses"] and recorder.counters[0][2] == 1
    marks = [(name, start.name.split()[0], end.name.split()[0]) for name, start, end, _ in recorder.spans]
    assert set(marks) == ({("gpu/replay_pipeline_batch_h2d", "started", "copied")} if events else set())


def test_the_packers_own_wait_for_a_copy_is_a_slice() -> None:
    recorder = Recorder()
    fake = {"device": "fake", "transfer": FakeDevice(1)}
    with buffer(40) as buf, pipeline(buf, trace_recorder=recorder, **fake) as pipe:
        pipe.sample_large_batch(0, N)
    assert "batch_h2d_wait" in names(recorder)


def test_a_wait_for_a_tick_is_a_slice_where_nothing_is_copied_too() -> None:
    recorder = Recorder()
    with buffer(40) as buf, pipeline(buf, trace_recorder=recorder) as pipe:
        pipe.start_prepare(0, N)
        pipe.wait_until_ready(0, N)
    assert names(recorder) == {"pack", "batch_h2d_wait"}


def test_slices_of_a_packing_collector() -> None:
    ours, theirs = Recorder(), Recorder()
    with buffer(40) as buf:
        pack = make_collector_pack(buf, N)
        with pipeline(
            buf, trace_recorder=ours, collector_pack_request_queue=pack[0], collector_pack_ready_queue=pack[1],
            collector_pack_shared_slots=pack[2],
        ) as pipe:  # fmt: skip
            thread = threading.Thread(
                target=lambda: serve_pack_requests(buf, *pack, 0.2, trace_recorder=theirs)
            )
            thread.start()
            pipe.sample_large_batch(0, N)
            thread.join()
        pack[2].cleanup()
    assert names(ours) == {"collector_pack_request", "gpu_wait_for_batch", "hot_cold_swap"}
    assert names(theirs) == {"pack"}


class NamesOnly:
    """A recorder whose methods take their arguments by name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def add_slice(self, *, name: str, category: str, start_ns: int, end_ns: int, args: Any = None) -> None:
        self.calls.append(
            (name, {"category": category, "start_ns": start_ns, "end_ns": end_ns, "args": args})
        )

    def add_counter(self, name: str, *, ts_ns: int, value: float) -> None:
        self.calls.append((name, {"ts_ns": ts_ns, "value": value}))


class SomeNames(NamesOnly):
    """As it, but what need not be given is all that goes by name alone."""

    def add_slice(self, name: str, category: str, start_ns: int, end_ns: int, *, args: Any = None) -> None:  # type: ignore[override]
        super().add_slice(name=name, category=category, start_ns=start_ns, end_ns=end_ns, args=args)

    def add_counter(self, **given: Any) -> None:  # type: ignore[override]
        super().add_counter(**given)


@pytest.mark.parametrize("kind", [NamesOnly, SomeNames])
def test_a_recorder_may_take_its_arguments_by_name_alone(kind: type[NamesOnly]) -> None:
    recorder = kind()
    with buffer(40) as buf, pipeline(buf, trace_recorder=recorder) as pipe:
        pipe.sample_large_batch(0, N)
    assert {name.removeprefix("replay_pipeline/") for name, _ in recorder.calls} >= {"pack", "misses"}


@pytest.mark.parametrize("slots", [[1, 2], [], object()])
def test_slots_that_are_none_are_named(slots: Any) -> None:
    with buffer(40) as buf:
        request, ready, real = make_collector_pack(buf, N)
        with pytest.raises(
            TypeError, match="collector_pack_shared_slots: must be the slots that make_collector_pack"
        ):
            pipeline(
                buf, collector_pack_request_queue=request, collector_pack_ready_queue=ready,
                collector_pack_shared_slots=slots,
            )  # fmt: skip
        real.cleanup()


@pytest.mark.parametrize("kind", [OSError, KeyError])
def test_an_exception_in_a_recorder_ends_tracing_not_training(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Recorder):
        def add_slice(self, *args: Any) -> None:
            super().add_slice(*args)
            raise kind("disk full")

    recorder = Broken()
    with buffer(40) as buf, pipeline(buf, trace_recorder=recorder) as pipe:
        for t in range(5):
            pipe.sample_large_batch(t, N)
            pipe.after_tick()
        assert pipe.stats().ticks == 5 and pipe.stats().failed == 0
    assert len(recorder.slices) == 1 and "disk full" in caplog.text


def test_a_trace_of_a_pipeline_opens(tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "trace.json") as recorder, buffer(40) as buf:
        device = FakeDevice(1)
        with pipeline(buf, device="fake", transfer=device, trace_recorder=recorder) as pipe:
            for t in range(4):
                pipe.sample_large_batch(t, N)
                pipe.after_tick()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["name"] == "gpu/replay_pipeline_batch_h2d"]
    assert [e["args"]["tick"] for e in spans] == [0, 1, 2, 3] and all(e["dur"] > 0 for e in spans)


@pytest.mark.parametrize("on_device", [True, False])
def test_one_csv_row_for_each_tick(tmp_path: Path, on_device: bool) -> None:
    device: dict[str, Any] = {"device": "fake", "transfer": FakeDevice(0)} if on_device else {}
    folder = tmp_path / "new" / "deep"
    with buffer(40) as buf, pipeline(buf, base_seed=3, verbose_output_dir=folder, **device) as pipe:
        metas = []
        for t in range(5):
            pipe.sample_large_batch(t, N)
            metas.append(pipe.metadata)
            add(buf, 1)
            pipe.after_tick()
        stats = pipe.stats()
    with open(folder / "pack_fields.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == COLUMNS and len(rows) == 5
    for row, meta in zip(rows, metas):
        assert meta is not None
        gpu = "" if meta.batch_gpu_slot is None else str(meta.batch_gpu_slot)
        assert row[:7] == [
            *map(str, (meta.tick_id, meta.snapshot_ptr, meta.snapshot_size, meta.sample_seed, N, meta.batch_host_slot)),
            gpu,
        ]  # fmt: skip
        assert (gpu != "") is on_device and (float(row[9]) > 0) is on_device
    assert sum(float(r[8]) for r in rows) == pytest.approx(stats.pack_us, abs=0.5)
    assert sum(float(r[10]) for r in rows) == pytest.approx(stats.wait_us, abs=0.5)


def test_verbose_logs_one_line_for_each_tick(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "recollect.ipc.replay_pipelines")
    with buffer(40) as buf:
        for verbose in (True, False):
            with pipeline(buf, verbose=verbose) as pipe:
                for t in range(3):
                    pipe.sample_large_batch(t, N)
                    pipe.after_tick()
            if verbose:
                lines = [r.getMessage() for r in caplog.records]
                assert len(lines) == 3
                assert [f"tick_id={t} " in line for t, line in enumerate(lines)] == [True] * 3
                caplog.clear()
        assert not caplog.records
