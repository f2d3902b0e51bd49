"""Reads columns of text of a Parquet file, some rows at a time."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_parallel.data.preprocess.records import shown
from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional

# Text that is read at a time, by the sizes in the file's own metadata, and rows at most.
_BATCH = 2**19
_ROWS = 1024
_BUFFER = 2**20


def read_columns(
    path: Path, names: Sequence[str]
) -> Iterator[tuple[list[list[bytes | None]], float]]:
    """Yields the values of some rows, column by column, and the share of rows read so far.

    The memory is that of some pages of the file, not of a row group. Values are not checked to be
    UTF-8; None is null.

    Raises:
        InputError: pyarrow is not installed; the file is damaged, or lacks a column with text.
    """
    parquet = import_optional("pyarrow.parquet", f"--input {path}")
    arrow = import_optional("pyarrow", f"--input {path}")
    try:
        with parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as file:
            for name in names:
                _check_column(arrow, file.schema_arrow, name, path)
            done, rows = 0, file.metadata.num_rows
            batches = file.iter_batches(
                batch_size=_rows_at_a_time(file.metadata), columns=list(names), use_threads=False
            )
            for batch in batches:
                done += batch.num_rows
                if batch.num_rows:
                    yield [_values(arrow, batch.column(name)) for name in names], done / rows
            if done != rows:
                raise InputError(f"--input {path} is damaged ({done:,} rows of {rows:,})")
    except (arrow.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"--input {path} is damaged ({reason}): get it again") from None


def _check_column(arrow: Any, schema: Any, name: str, path: Path) -> None:
    texts = [field.name for field in schema if _is_text(arrow, field.type)]
    if name in texts:
        return
    if name in schema.names:
        kind = schema.field(name).type
        raise InputError(
            f"--input {path} has {kind} in column {name!r}, not text (columns with text: "
            f"{shown(texts)}): see --json-keys"
        )
    raise InputError(
        f"--input {path} has no column {name!r} (columns with text: {shown(texts)}): "
        "see --json-keys"
    )


def _is_text(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    checks = (
        types.is_string, types.is_large_string, types.is_string_view,
        types.is_binary, types.is_large_binary, types.is_binary_view,
    )  # fmt: skip
    return any(check(kind) for check in checks)


def _values(arrow: Any, column: Any) -> list[bytes | None]:
    """As bytes: pyarrow would raise an error for the first text that is not UTF-8."""
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    large = arrow.types.is_large_string(column.type) or arrow.types.is_large_binary(column.type)
    return column.cast(arrow.large_binary() if large else arrow.binary()).to_pylist()


def _rows_at_a_time(metadata: Any) -> int:
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    longest = max((g.total_byte_size / max(1, g.num_rows) for g in groups), default=1)
    return max(1, min(_ROWS, int(_BATCH / max(1, longest))))
