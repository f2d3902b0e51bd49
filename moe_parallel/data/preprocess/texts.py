"""The texts of a file, one by one, for programs that read text and write no dataset."""

from collections.abc import Iterator
from pathlib import Path

from moe_parallel.data.preprocess.batches import Reader
from moe_parallel.data.preprocess.inputs import find_inputs
from moe_parallel.data.preprocess.records import Bad, Columns
from moe_parallel.errors import InputError


def read_texts(path: Path, key: str = "text", flag: str = "--input") -> Iterator[str]:
    """Yield the text under `key` of every record of a file in a format of preprocess_data.py.

    Raises:
        InputError: the file cannot be read, or a record has no text; the message names `flag`, the
            file, and the line or row.
    """
    columns = Columns((key,))
    for file, batch, _ in Reader(find_inputs([str(path)], flag), columns, digest=False).batches():
        for record in batch.records(columns):
            if isinstance(record, Bad):
                raise InputError(f"{file} {batch.unit} {record.number}: {record.reason}")
            yield record.texts[0]
