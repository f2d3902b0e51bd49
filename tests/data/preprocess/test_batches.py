import gzip
import hashlib
import random
from pathlib import Path

import pytest

from moe_parallel.data.indexed import SourceFile
from moe_parallel.data.preprocess import batches, records
from moe_parallel.data.preprocess.batches import Reader
from moe_parallel.data.preprocess.inputs import find_inputs
from moe_parallel.data.preprocess.records import Bad, Columns, Record
from moe_parallel.errors import InputError

COLUMNS = Columns(("text",))
LIMIT = 24


def read(*paths: Path) -> tuple[list[Record | Bad], list[int]]:
    """The records of some files, and the bytes that were read for each batch."""
    reader = Reader(find_inputs([str(path) for path in paths]), COLUMNS)
    found, sizes = [], []
    for _, batch, size in reader.batches():
        found += batch.records(COLUMNS)
        sizes.append(size)
    return found, sizes


def test_empty_lines_count_and_a_line_end_may_lack(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n \t\n{"text": "two \\ud800"}')
    found, sizes = read(path)
    domain = tmp_path.name
    assert found == [Record(1, ["one"], domain), Record(4, ["two ?"], domain)]
    assert sum(sizes) == path.stat().st_size


@pytest.mark.parametrize("seed", range(30))
def test_lines_are_those_of_the_file_however_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Lines around the limit, pieces around line ends, and pieces smaller than a line."""
    choose = random.Random(seed)
    monkeypatch.setattr(batches, "_BATCH", choose.choice([1, 3, 7, 16, LIMIT]))
    monkeypatch.setattr(batches, "LONGEST", LIMIT)
    around = [b'{"text": "%s"}' % (b"x" * length) for length in range(8, 18)]
    lines = [choose.choice([*around, b"", b"x" * 70]) for _ in range(40)]
    content = b"\n".join(lines)
    (tmp_path / "in").write_bytes(content)
    (tmp_path / "in.gz").write_bytes(gzip.compress(content))
    domain = tmp_path.name
    expected: list[Record | Bad] = []
    for number, line in enumerate(lines, start=1):
        if len(line) > LIMIT:
            reason = "longer than 16,777,216 bytes: divide the document"
            expected.append(Bad(number, reason))
        elif line:
            expected.append(Record(number, [line[10:-2].decode()], domain))
    for name in ("in", "in.gz"):
        assert read(tmp_path / name)[0] == expected


def test_sources_are_the_files_as_they_are_on_the_disk(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("b.jsonl", "a.jsonl.gz", "empty.jsonl")]
    paths[0].write_bytes(b'{"text": "1"}\n')
    # What follows the last member, as a tape or a block device pads a file, counts, too.
    paths[1].write_bytes(gzip.compress(b'{"text": "2"}\n') + bytes(512))
    paths[2].touch()
    reader = Reader(find_inputs([str(path) for path in paths]), COLUMNS)
    assert [len(list(batch.records(COLUMNS))) for _, batch, _ in reader.batches()] == [1, 1]
    assert reader.sources == [
        SourceFile(str(path), path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in paths
    ]


@pytest.mark.parametrize("name", ["a.txt", "a.TXT.gz"])
def test_plain_text_is_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(batches, "LONGEST", LIMIT)
    monkeypatch.setattr(records, "LONGEST", LIMIT)
    pack = gzip.compress if name.endswith("gz") else bytes
    for text in ("", "one\n\ntwo \r\n", "x" * LIMIT, "x" * (LIMIT + 1), "x" * 4 * 2**20):
        (tmp_path / name).write_bytes(pack(text.encode()))
        (record,), (size,) = read(tmp_path / name)
        assert size == (tmp_path / name).stat().st_size
        if len(text) <= LIMIT:
            assert record == Record(1, [text], tmp_path.name)
        else:
            assert isinstance(record, Bad) and record.reason.startswith("longer than")
    (tmp_path / name).write_bytes(pack(b"\xef\xbb\xbf1"))
    assert read(tmp_path / name)[0] == [Record(1, ["1"], tmp_path.name)]


def test_plain_text_under_two_keys_is_told_at_once(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.txt"):
        (tmp_path / name).write_text('{"text": "1", "title": "2"}\n')
    files = find_inputs([str(tmp_path / name) for name in ("a.jsonl", "b.txt")])
    reader = Reader(files, Columns(("text", "title")))
    with pytest.raises(InputError, match="b.txt is plain text, which has no keys, and --json-keys"):
        next(reader.batches())
