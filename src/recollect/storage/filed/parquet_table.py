"""Reading a Parquet file as an Arrow table, which is looked at before memory is taken.

A few hundred kilobytes can say that one value is there a billion times. The file's footer tells how many rows there
are. A text that it keeps once may be that of each of them: where all of that would not fit, rows are read in parts,
and what they take is looked at after each. Of a footer only what pyarrow does not check is looked at: what it says of
a column in a damaged one ends the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recollect.budget import available_nbytes, check_fits

OBJECT_NBYTES = 100  # of a value as an object of Python, in a list or a dict
_MOST_ROWS = 1 << 16
_SMALL_NBYTES = 64 << 20  # to look at how much memory is left takes longer than to read a small file
_DAMAGED = "free memory, or it is damaged"


def read_parquet_table(
    source: Any,
    where: object,
    *,
    columns: Sequence[str] | None = None,
    objects: bool = False,
    use_threads: bool = True,
) -> Any:
    """Read columns of a file; BudgetError if memory has no room for them, as objects too if `objects`.

    What pyarrow raises for a damaged file passes through.
    """
    import pyarrow as pa
    from pyarrow import parquet

    file = parquet.ParquetFile(source)
    chosen = None if columns is None else list(columns)
    types = [field.type for field in file.schema_arrow if chosen is None or field.name in chosen]
    n, widths = file.metadata.num_rows, [_width(pa, t) for t in types]
    beside = OBJECT_NBYTES * n * len(types) if objects else 0
    least = n * sum(width for width, _ in widths) + beside
    stored = max((file.metadata.row_group(k).total_byte_size for k in range(file.num_row_groups)), default=0)
    most = least + n * stored * sum(varies for _, varies in widths)
    if most <= _SMALL_NBYTES:
        return file.read(columns=chosen, use_threads=use_threads)
    check_fits(least, f"{where}: {n} rows", _DAMAGED, when=" to be read")
    available = available_nbytes()
    if available is None or most <= available:
        return file.read(columns=chosen, use_threads=use_threads)
    n_rows, parts, taken = max(1, min(_MOST_ROWS, available // (4 * max(1, stored)))), [], 0
    for part in file.iter_batches(n_rows, columns=chosen, use_threads=use_threads):
        taken += part.nbytes
        check_fits(4 * part.nbytes + beside, f"{where}: {taken} bytes and more", _DAMAGED, when=" to be read")
        parts.append(part)
    return pa.Table.from_batches(parts) if parts else file.read(columns=chosen, use_threads=use_threads)


def _width(pa: Any, kind: Any) -> tuple[int, bool]:
    """The bytes of a value of a type, and whether there may be more."""
    if pa.types.is_fixed_size_list(kind):
        width, varies = _width(pa, kind.value_type)
        return kind.list_size * width, varies
    if pa.types.is_struct(kind):
        parts = [_width(pa, kind.field(i).type) for i in range(kind.num_fields)]
        return sum(width for width, _ in parts), any(varies for _, varies in parts)
    try:
        return max(1, kind.bit_width // 8), False
    except ValueError:  # a text, a list or the like, which says where it begins
        return 4, True
