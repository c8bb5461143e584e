"""ParquetStorage: rows in immutable Parquet files, for data sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from recollect import _core, checks
from recollect.errors import FormatError
from recollect.spaces import Layout
from recollect.spaces.tree import as_keys
from recollect.storage.contract import SpaceStorage
from recollect.storage.filed.arrow import from_table, to_table
from recollect.storage.filed.base import AppendStorage, Array, Ints, Keys, from_saved
from recollect.storage.filed.chunks import CACHE_NBYTES, ChunkCache, check_sizes
from recollect.storage.filed.columns import Columns, longest, part_of, wide_layout
from recollect.storage.filed.commits import PIECE, Commits
from recollect.storage.filed.parquet_table import read_parquet_table


@dataclass(frozen=True, slots=True)
class Piece:
    """One file, of whose rows the first `n` count."""

    name: str
    n: int


def _ends_of(pieces: list[Piece]) -> Ints:
    return np.cumsum(np.array([piece.n for piece in pieces], np.int64))


class ParquetStorage(AppendStorage):
    """Data sets: append-only, any space, Text and Sequence of any length; readable by every Parquet reader.

    Rows wait in memory until a piece of `piece_size` is full, a segment ends, or `flush()`; then they are a file
    `part-N.parquet`, and committed. Pieces are read whole, and the last `cache_nbytes` of them are kept decoded.

    Ownership: the files stay; `close()` commits what is left.
    Concurrency: one writer; readers, in any process, see the last commit when they load.

    >>> import recollect as rc, tempfile
    >>> path = tempfile.mkdtemp() + "/data"
    >>> with rc.ReplayBuffer.create("parquet", {"x": ((), "int64")}, cache_path=path) as buf:
    ...     buf.extend({"x": [1, 2, 3]})
    >>> rc.ReplayBuffer.load_from(path)[-1]["x"].item()
    3
    """

    load_options = ("cache_nbytes",)
    short_name = "parquet"
    create_options = ("piece_size", "compression", "cache_nbytes")
    requires = ("pyarrow", "parquet")
    commits_from = PIECE

    def __init__(self, commits: Commits, prefix: str, space: Any, *, piece_size: int = 1024, compression: str = "zstd",
                 cache_nbytes: int = CACHE_NBYTES, cast: bool = False,
                 max_lengths: dict[str, int] | None = None) -> None:  # fmt: skip
        self._pa = self.need()
        _check_options(piece_size, compression, self._pa)
        SpaceStorage.__init__(self, space)
        most: dict[str, int] = {}
        longest(self.single_instance_space, (), most)
        super().__init__(commits, prefix, space, cast=cast, max_lengths=most)
        self._most = dict(max_lengths or {})  # what may not be exceeded, if the caller wants so
        if self._most:
            wide_layout(
                self.single_instance_space, {**most, **self._most}
            )  # refuses names that are no Sequence
        self.piece_size, self.compression, self.cache_nbytes = piece_size, compression, cache_nbytes
        self._pieces: list[Piece] = []
        self._ends = np.zeros(0, np.int64)
        self._pending = Columns(self.layout)
        self._caches: dict[Any, ChunkCache] = {}

    @classmethod
    def under(cls, commits: Commits, prefix: str, space: Any, capacity: int | None, **options: Any) -> Self:
        return cls(commits, prefix, space, **options)

    @classmethod
    def reopen(cls, commits: Commits, prefix: str, saved: dict[str, Any], space: Any, capacity: int | None,
               length: int, **options: Any) -> Self:  # fmt: skip
        def make(known: dict[str, Any]) -> Any:
            kept = {k: v for k, v in known.items() if k != "contents"}
            storage = cls(commits, prefix, space, **{**kept, **options})
            storage._pieces = [Piece(str(name), int(n)) for name, n in known["contents"]["pieces"]]
            storage._layout = wide_layout(storage.single_instance_space, known["contents"]["longest"])
            storage._pending = Columns(storage._layout)
            check_sizes([piece.n for piece in storage._pieces], "pieces")
            if max((piece.n for piece in storage._pieces), default=0) > storage.piece_size:
                raise ValueError(f"piece_size {storage.piece_size}, which is less than a piece has")
            storage._ends = _ends_of(storage._pieces)
            return storage

        storage: Self = from_saved(commits.directory.path, saved, make)
        for piece in storage._pieces:
            if (
                piece.n > commits.directory.about(piece.name)["bytes"]
            ):  # as few bytes may hold many equal rows: look
                storage._check_piece(piece)
        storage._truncate(length)
        return storage

    def options(self) -> dict[str, Any]:
        more = {"max_lengths": self._most} if self._most else {}
        return {**super().options(), "piece_size": self.piece_size, "compression": self.compression, **more}

    def contents(self) -> Any:
        pieces = [[piece.name, piece.n] for piece in self._pieces]
        return {"pieces": pieces, "longest": dict(self.layout.max_lengths)}

    # -- rows in

    def _encoded(self, value: Any, single: bool) -> tuple[int, list[Array]]:
        """Check a value, widening the layout to its longest Sequences."""
        layout = self._fitting(value, single)
        if single:
            n, arrays = 1, [a[None] for a in layout.encode_one(value, self.cast)]
        else:
            n, arrays = layout.encode_batch(value, self.cast)
        self._layout = layout
        self._pending.widen(layout)
        return n, arrays

    def _fitting(self, value: Any, single: bool) -> Layout:
        if self.layout.is_fixed or not self.layout.max_lengths:
            return self.layout
        most: dict[str, int] = {}
        values = _batched(self.single_instance_space, value) if single else value
        longest(self.single_instance_space, values, most)
        bounded = {k: min(n, self._most[k]) if k in self._most else n for k, n in most.items()}
        return wide_layout(
            self.single_instance_space, {k: max(n, self.layout.max_lengths[k]) for k, n in bounded.items()}
        )

    def checked_one(self, value: Any) -> Any:
        layout = self._fitting(value, True)
        return layout.decode_batch([a[None] for a in layout.encode_one(value, self.cast)], 1)

    def checked_batch(self, value: Any) -> tuple[int, Any]:
        layout = self._fitting(value, False)
        n, arrays = layout.encode_batch(value, self.cast)
        return n, layout.decode_batch(arrays, n)

    def _add(self, arrays: list[Array], n: int) -> None:
        self._pending.add(arrays, n)

    def _added(self) -> None:
        if self._tail() + self._pending.n >= self.piece_size:
            self._commits.due(PIECE)

    def _written(self) -> int:
        return self.stored_length() + self._pending.n

    def stored_length(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _truncate(self, length: int) -> None:
        """Keep the first rows only; files are not touched, a piece just counts fewer of its rows."""
        stored = self.stored_length()
        self._pending.n = max(0, min(self._pending.n, length - stored))
        if length >= stored:
            return
        first = int(np.searchsorted(self._ends, length, side="right"))
        start = int(self._ends[first - 1]) if first else 0
        kept = self._pieces[:first]
        if length > start:
            kept.append(Piece(self._pieces[first].name, length - start))
        gone = self._pieces[len(kept) :]
        self._forget_from(first)
        self._pieces, self._ends = kept, _ends_of(kept)
        for piece in gone:
            self.directory.drop(piece.name)

    def _check_piece(self, piece: Piece) -> None:
        from pyarrow import parquet

        try:
            with self.directory.open_file(piece.name) as f:
                found = parquet.read_metadata(f).num_rows
        except (self._pa.ArrowException, OSError) as error:
            raise FormatError(
                f"{self.directory.path}: {piece.name}: cannot be read ({error}); it is damaged"
            ) from None
        if found < piece.n:
            raise FormatError(
                f"{self.directory.path}: {piece.name}: must have {piece.n} rows, got {found}; it is damaged"
            )

    def _forget_from(self, piece: int) -> None:
        for cache in self._caches.values():
            cache.forget_from(piece)

    # -- files

    def _tail(self) -> int:
        """Rows of a last piece that is not full, which the next one takes in."""
        return self._pieces[-1].n if self._pieces and self._pieces[-1].n < self.piece_size else 0

    def write_out(self, urgency: int) -> None:
        tail = self._tail()
        total = tail + self._pending.n
        n_rows = total - total % self.piece_size if urgency == PIECE else total
        if n_rows <= tail or not self._pending.n:
            return
        columns = self._with_tail() if tail else self._pending
        written: list[Piece] = []
        try:
            for first in range(0, n_rows, self.piece_size):
                end = min(first + self.piece_size, n_rows)
                written.append(self._write_piece(columns, first, end))
        except BaseException:
            for piece in written:
                self.directory.drop(piece.name)
            raise
        old = self._pieces[-1:] if tail else []
        pieces = [*self._pieces[: len(self._pieces) - len(old)], *written]
        self._forget_from(len(pieces) - len(written))
        ends, rest = _ends_of(pieces), self._pending.without_front(n_rows - tail)
        self._pieces, self._ends, self._pending = (
            pieces,
            ends,
            rest,
        )  # at once: an interrupt may come before or after
        for piece in old:
            self.directory.drop(piece.name)

    def _with_tail(self) -> Columns:
        """The pending rows after those of the last piece."""
        layout, arrays = self._load(len(self._pieces) - 1, ())
        joined = Columns(layout)
        joined.add(arrays, len(arrays[0]))
        joined.widen(self.layout)
        joined.add(self._pending.cut(0, self._pending.n), self._pending.n)
        return joined

    def _write_piece(self, columns: Columns, first: int, end: int) -> Piece:
        from pyarrow import parquet

        name = self.directory.new_name(f"{self.prefix}part-", ".parquet")
        with self.directory.writing(name) as path:
            table = to_table(self._pa, columns.layout, columns.cut(first, end))
            parquet.write_table(
                table, path, compression=self.compression, use_dictionary=False, write_statistics=False
            )
        return Piece(name, end - first)

    # -- rows out

    def _read(self, rows: Ints, keys: Keys) -> tuple[Layout, list[Array]]:
        stored = self.stored_length()
        old = rows < stored
        if not self._pending.n or old.all():
            return self._cache(keys).gather(self._ends, rows)
        shown, new = self._pending.layout, self._pending.arrays
        if keys:
            shown, new = shown.project(keys), [new[i] for i in shown.field_indices(keys)]
        fresh = [a.take(rows[~old] - stored, axis=0) for a in new]
        if not old.any():
            return shown, fresh
        return _merged(old, *self._cache(keys).gather(self._ends, rows[old]), shown, fresh)

    def _cache(self, keys: Keys) -> ChunkCache:
        """The decoded pieces, of all columns or of some; those of a few choices are kept."""
        found = self._caches.get(keys)
        if found is None:
            if len(self._caches) >= 4:
                self._caches.pop(next(iter(self._caches))).close()
            layout = part_of(self.layout, keys)
            found = ChunkCache(layout, self.piece_size, self.cache_nbytes, lambda k: self._load(k, keys))
            self._caches[keys] = found
        return found

    def _load(self, number: int, keys: Keys) -> tuple[Layout, list[Array]]:
        piece = self._pieces[number]
        where = f"{self.directory.path}: {piece.name}"
        with self.directory.open_file(piece.name) as f:
            source: Any = f
            if not keys:  # it is read whole anyway
                data = f.read()
                if f"{_core.crc32c(data):08x}" != self.directory.about(piece.name)["crc32c"]:
                    raise FormatError(f"{where}: its checksum does not match; it is damaged")
                source = self._pa.BufferReader(data)
            table = self._table(source, keys, where)
        if table.num_rows < piece.n:
            raise FormatError(f"{where}: must have {piece.n} rows, got {table.num_rows}; it is damaged")
        layout, arrays = from_table(self._pa, part_of(self.layout, keys), table, where)
        return layout, [a[: piece.n] for a in arrays]

    def _table(self, source: Any, keys: Keys, where: str) -> Any:
        """The columns of the part under `keys`, named as its own layout names them."""
        names = [leaf.name for leaf in self.layout.leaves if leaf.path[: len(keys)] == keys]
        own = [leaf.name for leaf in self.layout.project(keys).leaves] if keys else names
        try:
            table = read_parquet_table(source, where, columns=names if keys else None, use_threads=False)
            return table.select(names).rename_columns(own) if keys else table
        except (self._pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise FormatError(
                f"{where}: must be a Parquet file of this space, got {error}; it is damaged"
            ) from None

    # -- chunks

    def chunk_ends(self) -> Any:
        ends = self._ends
        return np.append(ends, self._written()) if self._pending.n else ends

    def chunk_window(self) -> int:
        return max(1, min(64, self._cache(()).n_slots // 2))

    def checks_reads(self) -> bool:
        return True

    def expect(self, rows: Any, nested_keys: Any = ()) -> None:
        with self._commits.lock:
            if not (self._closed or self.is_mutable):  # who writes may drop what a thread reads
                self._cache(as_keys(nested_keys)).expect(self._ends, rows)

    def _release(self) -> None:
        for cache in self._caches.values():
            cache.close()
        self._pending = Columns(self.layout)


def _merged(
    old: Any, layout: Layout, columns: list[Array], shown: Layout, new: list[Array]
) -> tuple[Layout, list[Array]]:
    """Rows from files and from memory, in the order asked for."""
    from recollect.storage.filed.columns import widened

    if layout.max_lengths:
        both = {k: max(n, shown.max_lengths[k]) for k, n in layout.max_lengths.items()}
        layout = wide_layout(layout.space, both)
    out = []
    for field, a, b in zip(layout.fields, columns, new):
        whole = np.empty((len(old), *field.shape), field.dtype)
        whole[old], whole[~old] = widened(a, field.shape), widened(b, field.shape)
        out.append(whole)
    return layout, out


def _batched(space: Any, value: Any) -> Any:
    """One sample as the batch that lengths are measured in."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict | spaces.Tuple):
        from recollect.spaces.tree import children

        out = {}
        for key, child in children(space):
            try:
                out[key] = _batched(child, value[key])
            except (KeyError, IndexError, TypeError):
                out[key] = ()
        return out
    return (value,)


def _check_options(piece_size: Any, compression: Any, pa: Any) -> None:
    checks.count("piece_size", piece_size, most=(1 << 31) - 1)
    if compression != "none" and not (isinstance(compression, str) and pa.Codec.is_available(compression)):
        raise ValueError(f"compression: must be 'none', 'zstd', 'snappy' or 'lz4', got {compression!r}")
