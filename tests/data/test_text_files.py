"""Files and folders; plain text, JSON lines and Parquet, compressed or not."""

import bz2
import gzip
import io
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from moe_parallel.data import text_files
from moe_parallel.data.text_files import Bad, Record, find_inputs, read_records, read_texts
from moe_parallel.errors import InputError
from moe_parallel.reading import rows_at_a_time

FILES = (
    "code/b.jsonl", "code/a/z.parquet", "code/.hidden.jsonl", "code/.cache/c.jsonl",
    "code/README.md", "code/dataset_info.json", "prose/1.json.gz", "prose/2.JSONL.ZST",
    "prose/old.json", "code/notes.txt", "books/part/2.txt", "books/1.TXT.bz2", "books/cover.png",
    "empty/notes.md",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in FILES:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("12345")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(*words: str) -> list[str]:
    return [str(each.path) for each in find_inputs(words)]


def test_files_are_found_in_folders(folder: Path) -> None:
    assert found("data/prose", "data/code", "data/code/README.md") == [
        "data/prose/1.json.gz", "data/prose/2.JSONL.ZST", "data/code/a/z.parquet",
        "data/code/b.jsonl", "data/code/README.md",
    ]  # fmt: skip
    assert found("data/books") == ["data/books/1.TXT.bz2", "data/books/part/2.txt"]
    os.mkfifo("pipe")
    assert [each.size for each in find_inputs(["data/prose/old.json", "pipe"])] == [5, None]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data/empty"], r"--text data/empty is a folder without text: .*\.jsonl"),
        (["data/none"], r"--text data/none cannot be read \(No such file"),
        (["data/loop"], r"--text data/loop cannot be read \(Too many levels"),
        (["data/code", "data/code/b.jsonl"], r"--text names data/code/b\.jsonl twice"),
        (["data/code", "data/again.jsonl"], r"--text names data/again\.jsonl twice"),
        (["data/pipes"], r"--text data/pipes/in\.jsonl is not a regular file"),
    ],
)
def test_what_names_no_text_is_told(folder: Path, words: list[str], message: str) -> None:
    os.symlink("loop", "data/loop")
    os.symlink(folder / "data/code/b.jsonl", "data/again.jsonl")
    os.mkdir("data/pipes")
    os.mkfifo("data/pipes/in.jsonl")
    with pytest.raises(InputError, match=message):
        find_inputs(words, "--text")


def read(*paths: Path, keys: tuple[str, ...] = ("text",)) -> list[Record | Bad]:
    """The records, after a check that the progress is that of the bytes on the disk."""
    counts: list[int] = []
    records = list(read_records(find_inputs([str(path) for path in paths]), keys, counts.append))
    assert sum(counts) == sum(path.stat().st_size for path in paths)
    return records


def texts(*paths: Path) -> list[str]:
    return [record.texts[0] for record in read(*paths) if isinstance(record, Record)]


def zst(data: bytes) -> bytes:
    return pyarrow.compress(data, codec="zstd", asbytes=True)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, mtime=0), ".bz2": bz2.compress, ".zst": zst,
}  # fmt: skip
NUMBERS = [str(random.Random(i).getrandbits(40)) for i in range(60)]
LINES = b"".join(b'{"text": "%s"}\n' % number.encode() for number in NUMBERS)


def test_empty_lines_count_and_a_line_end_may_lack(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n \t\n{"title": "", "text": "two \\ud800"}')
    name = f"--input {path} line"
    assert read(path) == [Record(f"{name} 1", ["one"]), Record(f"{name} 4", ["two ?"])]
    assert list(read_texts(path)) == ["one", "two ?"]
    with pytest.raises(InputError, match=r"^--text \S+ line 1: no key 'title' .its keys: 'text'."):
        list(read_texts(path, "title", "--text"))


@pytest.mark.parametrize("suffix", ["", *PACKERS])
@pytest.mark.parametrize("seed", range(3))
def test_lines_around_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, seed: int
) -> None:
    choose = random.Random(seed)
    monkeypatch.setattr(text_files, "LONGEST", 24)
    around = [b'{"text": "%s"}' % (b"x" * length) for length in range(8, 18)]
    lines = [choose.choice([*around, b"", b"x" * 70]) for _ in range(40)]
    path = tmp_path / f"in{suffix}"
    path.write_bytes(PACKERS.get(suffix, bytes)(b"\n".join(lines)))
    expected: list[Record | Bad] = []
    for number, line in enumerate(lines, start=1):
        place = f"--input {path} line {number}"
        if len(line) > 24:
            expected.append(Bad(place, "longer than 24 bytes: divide the document"))
        elif line:
            expected.append(Record(place, [line[10:-2].decode()]))
    assert read(path) == expected


@pytest.mark.parametrize("suffix", [".txt", ".TXT.gz"])
def test_plain_text_is_one_document_under_any_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(text_files, "LONGEST", 24)
    path, pack = tmp_path / f"in{suffix}", PACKERS.get(suffix[4:].lower(), bytes)
    for text in ("", "one\n\ntwo \r\n", "\ufeffx", "x" * 24, "x" * 25):
        path.write_bytes(pack(text.encode()))
        (record,) = read(path, keys=("body",))
        if len(text) <= 24:
            assert record == Record(f"--input {path} document 1", [text.removeprefix("\ufeff")])
        else:
            assert isinstance(record, Bad) and record.reason.startswith("longer than")
    with pytest.raises(InputError, match="is plain text, which has no keys, and --json-keys"):
        read(path, keys=("text", "title"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', r"not JSON \(Expecting ',' delimiter, column 13\)"),
        (b"[1]", "not a JSON object: expected one {...} per line"),
        (b'{"body": "a", "id": 1}', r"no key 'text' \(its keys: 'body', 'id'\): see --json-keys"),
        (b"{}", r"no key 'text' \(its keys: none\)"),
        (b'{"text": 7}', "int, not text, under 'text'"),
        (b'{"text": null}', "NoneType, not text, under 'text'"),
        (b'{"text": "\xff"}', r"not UTF-8 \(byte 11\): convert it, as iconv"),
        (b'{"text": ' + b"[" * 100_000, r"not JSON \(maximum recursion depth"),
        (b'{"text": ' + b"9" * 5_000 + b"}", r"not JSON \(Exceeds the limit"),
        (b"{" + b", ".join(b'"%s%d": 1' % (b"k" * 9_999, i) for i in range(99)) + b"}", "no key"),
    ],
)
def test_a_bad_line_has_its_number_and_a_reason(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b'\n{"text": "too"}')
    good, bad, last = read(path)
    assert isinstance(bad, Bad) and bad.place == f"--input {path} line 2"
    assert re.match(reason, bad.reason) and len(bad.reason) < 600
    assert [record.texts for record in (good, last) if isinstance(record, Record)] == [
        ["fine"], ["too"],
    ]  # fmt: skip


def in_parquet() -> bytes:
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": NUMBERS}), stream, row_group_size=25)
    return stream.getvalue()


@pytest.mark.parametrize("name", [*(f"in.jsonl{suffix}" for suffix in PACKERS), "in.parquet"])
def test_every_cut_and_flipped_bit_is_told(tmp_path: Path, name: str) -> None:
    """Compressed as two members or frames, as `cat a.gz b.gz` writes them."""
    path, pack = tmp_path / name, PACKERS.get(name.removeprefix("in.jsonl"))
    whole = pack(LINES[:500]) + pack(LINES[500:]) if pack else in_parquet()
    path.write_bytes(whole)
    records = read(path)
    assert texts(path) == NUMBERS
    for length in {0, *range(1, len(whole), 7)} - {len(pack(LINES[:500])) if pack else 0}:
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"in\.\S+ is (damaged|empty)") as told:
            texts(path)
        assert "\n" not in str(told.value)
    for bit in random.Random(0).sample(range(8 * len(whole)), 400):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:  # pyarrow writes no checksum into .zst and Parquet
            read_back = list(read_records(find_inputs([str(path)]), ["text"]))
            assert read_back == records or name.endswith(("zst", "parquet")), bit
        except InputError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_small_file_with_much_in_it_is_read_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(text_files, "LONGEST", 2**16)
    path = tmp_path / f"bomb{suffix}"
    path.write_bytes(PACKERS[suffix](bytes(60 * 2**20)))
    (file,) = find_inputs([str(path)])
    with path.open("rb", buffering=0) as raw:
        stream, before = text_files._unpacked(file, raw), pyarrow.total_allocated_bytes()
        while stream.readline(2**16):
            assert pyarrow.total_allocated_bytes() - before < 2**23
    assert [type(record) for record in read(path)] == [Bad]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *((f"in{suffix}", LINES, r"is damaged \(.*\): get it again") for suffix in PACKERS),
        ("in.parquet", LINES, r"is damaged \(.*Parquet.*\): get it again"),
        ("in.jsonl.xz", LINES, r"is a format that is not read: unpack it \(xz -d\)"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_told(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as told:
        read(tmp_path / name)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["in.zst", "in.parquet"])
def test_without_pyarrow_its_installation_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_bytes(zst(LINES))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match=r"in\.\w+ needs pyarrow, .*: pip install pyarrow$"):
        read(tmp_path / name)


def written(path: Path, table: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(pyarrow.table(table), path, **options)
    return path


KINDS = (
    pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(),
    pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_columns_of_text_come_as_they_were_written(tmp_path: Path, kind: pyarrow.DataType) -> None:
    column = ["one", "", "naïve 漢字", None, *(f"text {i % 7}" for i in range(60))]
    table = {
        "id": list(range(64)), "text": pyarrow.array(column, pyarrow.string()).cast(kind),
        "title": [f"t{i}" for i in range(64)],
    }  # fmt: skip
    path = written(tmp_path / "in.parquet", table, row_group_size=25, compression="zstd")
    records = read(path, keys=("title", "text"))
    bad = records.pop(3)
    assert bad == Bad(f"--input {path} row 4", "NoneType, not text, under 'text'")
    assert [record.texts for record in records if isinstance(record, Record)] == [
        [f"t{i}", text] for i, text in enumerate(column) if text is not None
    ]
    with pytest.raises(InputError, match="has no column 'body' .its columns: 'id', 'text', 'ti"):
        read(path, keys=("body",))
    assert isinstance(read(path, keys=("id",))[0], Bad)


def test_parquet_is_read_some_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of rows may share a text that the file holds once; a footer may lie."""
    shared = pyarrow.array(["x" * 2**20]).dictionary_encode().take([0] * 60)
    path = written(
        tmp_path / "in.parquet", {"text": shared}, compression="zstd", store_schema=False
    )
    assert path.stat().st_size < 2**10
    monkeypatch.setattr("moe_parallel.reading.MOST_OF_ROWS", 2**23)
    before, rows = pyarrow.total_allocated_bytes(), 0
    for _ in read_records(find_inputs([str(path)]), ["text"]):
        rows += 1
        assert pyarrow.total_allocated_bytes() - before < 2**25
    assert rows == 60
    lie = parquet.read_metadata(written(tmp_path / "in", {"text": ["a"]}))
    assert rows_at_a_time(lie) == 64
