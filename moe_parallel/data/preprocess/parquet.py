"""Reads columns of text of a Parquet file, some rows at a time."""

from collections.abc import Iterator, Sequence
from typing import Any

from moe_parallel.data.preprocess.inputs import InputFile
from moe_parallel.data.preprocess.records import quoted_names
from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional
from moe_parallel.reading import rows_at_a_time

# Text and rows of a batch, at most.
_BATCH = 2**19
_ROWS = 1024
_BUFFER = 2**20


def read_columns(
    file: InputFile, names: Sequence[str]
) -> Iterator[tuple[list[list[bytes | None]], float]]:
    """Yields the values of some rows, column by column, and the share of rows read so far.

    `names`: of columns; "a.b" is also the field b of the column a.

    The memory is that of some pages of the file, not of a row group, and of MOST_OF_ROWS bytes.
    Values are not checked to be UTF-8; None is null.

    Raises:
        InputError: pyarrow is not installed; the file is damaged, or lacks a column with text.
    """
    parquet = import_optional("pyarrow.parquet", str(file))
    arrow = import_optional("pyarrow", str(file))
    try:
        with parquet.ParquetFile(file.path, buffer_size=_BUFFER, pre_buffer=False) as opened:
            for name in names:
                _check_column(arrow, opened.schema_arrow, name, file)
            done, rows = 0, opened.metadata.num_rows
            batches = opened.iter_batches(
                batch_size=rows_at_a_time(opened.metadata), columns=list(names), use_threads=False
            )
            waiting: list[tuple[bytes | None, ...]] = []
            size = 0
            for batch in batches:
                columns = [_values(arrow, _column(batch, name)) for name in names]
                for row in zip(*columns, strict=True):
                    length = sum(len(value or b"") for value in row)
                    if waiting and (size + length > _BATCH or len(waiting) == _ROWS):
                        yield [list(column) for column in zip(*waiting, strict=True)], done / rows
                        waiting, size = [], 0
                    waiting.append(row)
                    size += length
                    done += 1
            if waiting:
                yield [list(column) for column in zip(*waiting, strict=True)], done / rows
            if done != rows:
                raise InputError(f"{file} is damaged ({done:,} rows of {rows:,}): get it again")
    except (arrow.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{file} is damaged ({reason}): get it again") from None


def _check_column(arrow: Any, schema: Any, name: str, file: InputFile) -> None:
    types = dict(_types(arrow, schema))
    texts = [each for each, kind in types.items() if _is_text(arrow, kind)]
    if name in texts:
        return
    known = f"(columns with text: {quoted_names(texts)}): see --json-keys"
    if name in types:
        raise InputError(f"{file} has {types[name]} in column {name!r}, not text {known}")
    raise InputError(f"{file} has no column {name!r} {known}")


def _types(arrow: Any, fields: Any, outer: str = "") -> Iterator[tuple[str, Any]]:
    """The names and types of columns, and those of the fields in them: "column.field"."""
    for field in fields:
        if not outer or "." not in field.name:
            yield outer + field.name, field.type
        if arrow.types.is_struct(field.type) and "." not in field.name:
            yield from _types(arrow, field.type, f"{outer}{field.name}.")


def _column(batch: Any, name: str) -> Any:
    if name in batch.schema.names:
        return batch.column(name)
    outer, *fields = name.split(".")
    column = batch.column(outer)
    for field in fields:
        index = column.type.get_field_index(field)
        column = column.flatten()[index]  # null where the column is
    return column


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
