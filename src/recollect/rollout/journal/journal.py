"""The journal: live batches and their finished runs in SQLite, so that a killed coordinator loses nothing recorded.

One thread writes, in groups: the first change of a group waits at most 10 ms for others, a flush not at all. WAL keeps
what was committed through `kill -9`; `power_safe` syncs each group as well. The database is locked exclusively while
it is open, a lock that the kernel drops with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
import time
import warnings
import weakref
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from recollect.errors import FormatError, LaneBusyError
from recollect.rollout.batch.records import BatchRecord, Joined, TaskRecord
from recollect.rollout.journal.format import (
    JournalBatch,
    JournalContents,
    SavedMeta,
    decode_batch,
    decode_cut,
    decode_outcome,
    encode,
    read_ending,
    saved_batch,
    saved_cut,
    saved_ending,
)
from recollect.rollout.tasks import RunOutcome

FORMAT = 1
GROUP_S = 0.010
TABLES = """
begin exclusive;
create table if not exists meta (key text primary key, value);
create table if not exists batches (serial integer primary key, about blob, cut blob, ended blob);
create table if not exists runs (serial integer, position integer, run integer, outcome blob,
                                 primary key (serial, position, run)) without rowid;
commit;
"""  # all or nothing: some of them alone are another program's


Change = tuple[str, tuple[Any, ...]]
MOVE_RUNS = "update or replace runs set serial = ?, position = ? where serial = ? and position = ?"


class Journal:
    """An open journal.

    Ownership: owns the database and its thread. Concurrency: called from the coordinator's loop; only the thread
    touches the database. What could not be written is kept and written first the next time; `flush` raises until
    everything is.
    """

    def __init__(self, path: str, config: Any, layout: str, loop: asyncio.AbstractEventLoop) -> None:
        self.path, self.layout, self.loop = path, layout, loop
        self.history, self.power_safe = config.history, config.power_safe
        self.restored = JournalContents()
        self._changes: SimpleQueue[list[Change] | asyncio.Future[None] | None] = SimpleQueue()
        self._serials: dict[BatchRecord, int] = {}
        self._next_serial = 1
        self._unwritten: list[list[Change]] = []  # what failed, in order; only the thread touches it
        self._thread = threading.Thread(target=self._serve, name="journal", daemon=True)
        self._opened: asyncio.Future[JournalContents] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()

    @classmethod
    async def open(cls, path: str, config: Any, layout: str) -> Journal:
        """Open or make a journal; LaneBusyError if it is held, FormatError if it is another's."""
        _let_go_of_closed_loops(path)
        journal = cls(path, config, layout, asyncio.get_running_loop())
        _open.add(journal)
        await journal.start()
        return journal

    async def start(self) -> None:
        """Start the thread and read what the database holds."""
        self._thread.start()
        try:
            self.restored = await self._opened
        except asyncio.CancelledError:  # nobody will close it
            self._end()
            raise
        self._next_serial = 1 + max([kept.serial for kept in self.restored.batches], default=0)
        self._next_serial = max(self._next_serial, self._first_free)

    # -- what happened, from the loop

    def record_batch(self, batch: BatchRecord, next_group: int, k: int, first_version: int) -> None:
        """Record a batch that was admitted."""
        serial = self._serials[batch] = self._next_serial
        self._next_serial += 1
        self._put("insert into batches (serial, about) values (?, ?)", serial, saved_batch(batch))
        for key, value in (("next_group", next_group), ("k", k), ("first_version", first_version)):
            self._put("insert or replace into meta values (?, ?)", key, value)

    def resume_batch(self, batch: BatchRecord, serial: int) -> None:
        """Go on recording a batch that came out of this journal."""
        self._serials[batch] = serial

    def record_run(self, task: TaskRecord, outcome: RunOutcome) -> None:
        """Record a finished run."""
        serial = self._serials.get(task.batch)
        if serial is not None:
            self._put(
                "insert or replace into runs values (?, ?, ?, ?)",
                serial,
                task.position,
                outcome.run_id,
                encode(outcome),
            )

    def record_cut(self, batch: BatchRecord, carrier: BatchRecord | None, joined: list[Joined]) -> None:
        """Record which results count, what is carried on, and what of earlier carriers joins: all or nothing."""
        cut, serial = batch.cut, self._serials.get(batch)
        if cut is None or serial is None:
            return
        changes: list[Change] = []
        if carrier is not None:
            changes += self._begin_carrier(carrier, serial)
        for moved in joined:
            changes += self._join(moved, serial)
        for other in {moved.carrier for moved in joined}:
            changes.append(self._without_joined(other))
        about = "update batches set about = ?, cut = ? where serial = ?"
        changes.append((about, (saved_batch(batch), saved_cut(cut), serial)))
        self._changes.put(changes)

    def _begin_carrier(self, carrier: BatchRecord, serial: int) -> list[Change]:
        own = self._serials[carrier] = self._next_serial
        self._next_serial += 1
        insert = "insert into batches (serial, about) values (?, ?)"
        moves: list[Change] = [
            (MOVE_RUNS, (own, task.position, serial, task.position)) for task in carrier.tasks
        ]
        return [(insert, (own, saved_batch(carrier, is_carrier=True))), *moves]

    def _join(self, moved: Joined, serial: int) -> list[Change]:
        """The runs of a task that joins go with it; those of one that failed are not needed again."""
        source = self._serials.get(moved.carrier)
        if moved.is_used:
            return [(MOVE_RUNS, (serial, moved.task.position, source, moved.position))]
        return [("delete from runs where serial = ? and position = ?", (source, moved.position))]

    def _without_joined(self, carrier: BatchRecord) -> Change:
        if carrier.tasks:
            about = saved_batch(carrier, is_carrier=True)
            return "update batches set about = ? where serial = ?", (about, self._serials.get(carrier))
        return "delete from batches where serial = ?", (self._serials.pop(carrier, None),)

    def record_end(self, batch: BatchRecord, reason: str | None, k: int) -> None:
        """Record how a batch ended and let go of its payloads."""
        serial = self._serials.pop(batch, None)
        if serial is None:
            return
        self._put("delete from runs where serial = ?", serial)
        self._put(  # under a new number: endings are remembered in their own order
            "update batches set serial = ?, ended = ?, about = null, cut = null where serial = ?",
            self._next_serial,
            saved_ending(batch.state, reason),
            serial,
        )
        self._next_serial += 1
        self._put("insert or replace into meta values (?, ?)", "k", k)
        self._put(
            "delete from batches where ended is not null and serial not in "
            "(select serial from batches where ended is not null order by serial desc limit ?)", self.history,
        )  # fmt: skip

    def _put(self, statement: str, *values: Any) -> None:
        self._changes.put([(statement, values)])

    async def flush(self) -> None:
        """Return once everything so far is recorded."""
        done: asyncio.Future[None] = self.loop.create_future()
        self._changes.put(done)
        await done

    async def close(self) -> None:
        """Record what waits, and close; warns if that cannot be recorded."""
        self._changes.put(None)
        try:
            if self._thread.is_alive():
                await self._ended
        finally:
            self._thread.join()

    def _end(self) -> None:
        """The same, where no loop is left to wait in."""
        self._changes.put(None)
        self._thread.join()

    # -- the thread

    def _serve(self) -> None:
        try:
            database = self._connect()
        except BaseException as error:
            self._answer(self._opened, None, error)
            return
        try:
            with contextlib.closing(database):
                self._answer(self._opened, self._read(database), None)
                while self._write_group(database):
                    pass
        except BaseException as error:
            broken = self._broken(error)
            self._answer(self._opened, None, broken)
        finally:
            self._answer(self._ended, None, None)

    def _broken(self, error: BaseException) -> Exception:
        """What to tell of a journal that could not be read: the disk is not the file."""
        if isinstance(error, FormatError):
            return error
        if _is_of_disk(error):
            return OSError(f"{self.path}: cannot be opened ({error}); free the disk, or mend it")
        return FormatError(f"{self.path}: cannot be read: {error!r}")

    def _answer(self, future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
        def answer() -> None:
            if not future.done():
                future.set_result(value) if error is None else future.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(answer)

    def _write_group(self, database: sqlite3.Connection) -> bool:
        """Write what is there; the first change waits up to 10 ms for others, a flush not at all."""
        first = self._changes.get()
        group, ends = [first], time.monotonic() + GROUP_S
        while isinstance(group[-1], list):
            try:
                group.append(self._changes.get(timeout=max(0.0, ends - time.monotonic())))
            except Empty:
                break
        failure = self._write(database, [change for change in group if isinstance(change, list)])
        for change in group:
            if isinstance(change, asyncio.Future):
                self._answer(change, None, failure)
        if group[-1] is None and failure is not None:
            self.loop.call_soon_threadsafe(self._tell_lost, failure, len(self._unwritten))
        return group[-1] is not None

    def _write(self, database: sqlite3.Connection, group: list[list[Change]]) -> Exception | None:
        """Write changes after those that failed before, all or nothing; return what went wrong."""
        self._unwritten += group
        try:
            if database.in_transaction:  # the last one failed, and so did its end
                database.rollback()
            with database:
                for changes in self._unwritten:
                    for statement, values in changes:
                        database.execute(statement, values)
        except Exception as error:
            if not _is_of_disk(error):
                return error
            return OSError(f"{self.path}: cannot be written ({error}); free the disk, or mend it")
        self._unwritten = []
        return None

    def _tell_lost(self, failure: Exception, n: int) -> None:
        warnings.warn(
            f"{self.path}: {n} changes could not be recorded ({failure}); what they tell of is done again after the "
            "next prepare; free the disk", RuntimeWarning, stacklevel=2,
        )  # fmt: skip

    def _connect(self) -> sqlite3.Connection:
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise FormatError(f"{self.path}: must be a journal, got no plain file")
        try:
            database = sqlite3.connect(self.path, timeout=0.0, check_same_thread=False)
        except sqlite3.OperationalError as error:
            raise FileNotFoundError(
                f"journal: {self.path} cannot be opened: {error}; make its directory"
            ) from None
        try:
            database.execute("pragma locking_mode = exclusive")
            # Lists: a cursor that a traceback keeps would keep the lock as well.
            names = database.execute("select name from sqlite_master where type = 'table'").fetchall()
            tables = {str(name) for (name,) in names}
            if tables and not {"meta", "batches", "runs"} <= tables:
                raise sqlite3.DatabaseError(f"another program's database, with the tables {sorted(tables)}")
            database.execute("pragma journal_mode = wal")
            database.execute(f"pragma synchronous = {'full' if self.power_safe else 'normal'}")
            database.executescript(TABLES)
        except (sqlite3.DatabaseError, UnicodeError) as error:  # UnicodeError: a damaged name
            database.close()
            if "locked" in str(error):
                raise LaneBusyError(
                    f"{self.path}: the journal is held by a live process; shut that one down"
                ) from None
            if _is_of_disk(error):
                raise self._broken(error) from None
            raise FormatError(f"{self.path}: must be a journal, got {error}") from None
        return database

    def _read(self, database: sqlite3.Connection) -> JournalContents:
        meta = dict(database.execute("select key, value from meta"))
        if meta.get("format", FORMAT) != FORMAT:
            raise FormatError(f"{self.path}: format must be {FORMAT}, got {meta['format']}; update recollect")
        if meta.get("layout", self.layout) != self.layout:
            raise FormatError(f"{self.path}: is of another experience space; use the space it was made with")
        with database:
            database.executemany(
                "insert or replace into meta values (?, ?)", [("format", FORMAT), ("layout", self.layout)]
            )
        counters = msgspec.convert(meta, SavedMeta)
        restored = JournalContents(
            next_group=counters.next_group, k=counters.k, first_version=counters.first_version
        )
        self._first_free = 1
        for serial, about, cut, ended in database.execute("select * from batches order by serial").fetchall():
            self._first_free = serial + 1
            if ended is not None:
                ending = read_ending(ended)
                restored.history[ending.state.batch_id] = ending
                continue
            runs = database.execute(
                "select position, outcome from runs where serial = ? order by position, run", (serial,)
            ).fetchall()
            restored.batches.append(
                JournalBatch(
                    serial,
                    decode_batch(about),
                    None if cut is None else decode_cut(cut),
                    [(position, decode_outcome(outcome)) for position, outcome in runs],
                )
            )
        return restored


def _let_go_of_closed_loops(path: str) -> None:
    """Close journals of this file whose event loop is closed: their coordinator was never shut down, and cannot be."""
    for journal in list(_open):
        if journal.loop.is_closed() and os.path.realpath(journal.path) == os.path.realpath(path):
            journal._end()


_open: weakref.WeakSet[Journal] = weakref.WeakSet()  # a journal lives as long as its thread


def _is_of_disk(error: BaseException) -> bool:
    """Whether SQLite tells of the disk, not of the file's contents."""
    name = getattr(error, "sqlite_errorname", "")
    return name.startswith(("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN"))
