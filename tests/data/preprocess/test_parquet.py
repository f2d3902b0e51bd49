import random
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from moe_parallel.data.preprocess import parquet as ours
from moe_parallel.data.preprocess.inputs import InputFile
from moe_parallel.data.preprocess.parquet import read_columns
from moe_parallel.errors import InputError
from moe_parallel.reading import rows_at_a_time

TEXTS = ["one", "", "naïve 漢字", None, *(f"text {i % 7}" for i in range(60))]


def write(path: Path, table: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(pyarrow.table(table), path, **options)
    return path


def opened(path: Path) -> InputFile:
    return InputFile(path, "text", path.stat().st_size, "--input")


def read(path: Path, *names: str) -> list[list[bytes | None]]:
    columns: list[list[bytes | None]] = [[] for _ in names]
    for values, _ in read_columns(opened(path), names):
        for column, some in zip(columns, values, strict=True):
            column += some
    return columns


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.binary(),
        pyarrow.large_binary(),
        pyarrow.string_view(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ],
    ids=str,
)
def test_columns_of_text_come_as_they_were_written(
    tmp_path: Path, kind: pyarrow.DataType, compression: str
) -> None:
    column = pyarrow.array(TEXTS, pyarrow.string()).cast(kind)
    numbers = list(range(len(TEXTS)))
    table = {"id": numbers, "a.b": column, "title": [f"t{i}" for i in numbers]}
    path = write(tmp_path / "in", table, row_group_size=25, compression=compression)
    expected = [None if text is None else text.encode() for text in TEXTS]
    titles, texts = read(path, "title", "a.b")
    assert texts == expected
    assert titles == [f"t{i}".encode() for i in numbers]


def test_fields_in_columns_have_dotted_names(tmp_path: Path) -> None:
    inner = [{"b": "1"}, None, {"b": None}, {"b": "4"}]
    rows = [{"source": f"s{i}", "of": each} for i, each in enumerate(inner)]
    table = {"meta": [*rows, None], "meta.source": list("vwxyz"), "text": list("abcde")}
    path = write(tmp_path / "in", table, row_group_size=2)
    letters = [[each.encode() for each in word] for word in ("vwxyz", "abcde")]
    expected = [[b"1", None, None, b"4", None], *letters]
    assert read(path, "meta.of.b", "meta.source", "text") == expected
    del table["meta.source"]
    path = write(tmp_path / "other", table, row_group_size=2)
    assert read(path, "meta.source") == [[b"s0", b"s1", b"s2", b"s3", None]]


@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
def test_rows_come_in_order_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(ours, "_ROWS", rows)
    path = write(tmp_path / "in", {"text": [str(i) for i in range(300)]}, row_group_size=64)
    found, shares = [], []
    for (values,), share in read_columns(opened(path), ["text"]):
        assert 1 <= len(values) <= rows
        found += values
        shares.append(share)
    assert found == [b"%d" % i for i in range(300)]
    assert shares == sorted(shares) and shares[-1] == 1


def test_long_texts_come_a_few_at_a_time(tmp_path: Path) -> None:
    texts = [random.Random(i).randbytes(100_000) for i in range(40)]
    path = write(tmp_path / "in", {"text": texts})
    batches = [values for (values,), _ in read_columns(opened(path), ["text"])]
    assert [text for batch in batches for text in batch] == texts
    assert max(map(len, batches)) <= 5


def test_a_text_that_all_rows_share_is_read_some_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = pyarrow.array(["x" * 2**20]).dictionary_encode().take([0] * 60)
    path = write(tmp_path / "in", {"text": texts}, compression="zstd", store_schema=False)
    assert path.stat().st_size < 2**10
    monkeypatch.setattr("moe_parallel.reading.MOST_OF_ROWS", 2**23)
    before, rows = pyarrow.total_allocated_bytes(), 0
    for (values,), _ in read_columns(opened(path), ["text"]):
        rows += len(values)
        assert len(values) == 1 and pyarrow.total_allocated_bytes() - before < 2**25
    assert rows == 60


def test_long_texts_are_read_some_rows_at_a_time_whatever_a_footer_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = pyarrow.array([b"x" * 2**20], pyarrow.binary(2**20))
    metadata = parquet.read_metadata(write(tmp_path / "wide", {"text": ["a"], "wide": wide}))
    monkeypatch.setattr("moe_parallel.reading.MOST_OF_ROWS", 2**22)
    assert rows_at_a_time(metadata) <= 4
    lie = parquet.read_metadata(write(tmp_path / "in", {"text": ["a"]}))  # by which all are short
    assert rows_at_a_time(lie) == 64


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    assert read(write(tmp_path / "in", {"text": pyarrow.array([], pyarrow.string())}), "text") == [
        []
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("body", r"in has no column 'body' \(columns with text: 'text', .*\): see --json-keys"),
        ("id", r"in has int64 in column 'id', not text \(columns with text: 'text', "),
        ("meta", r"in has struct<.*> in column 'meta', not text .*: 'text', 'meta.a', 'title'\)"),
        ("meta.n", r"in has int64 in column 'meta.n', not text"),
        ("meta.list.a", r"in has no column 'meta.list.a'"),
        ("list", r"in has list<.*string> in column 'list', not text"),
    ],
)
def test_a_column_without_text_is_told(tmp_path: Path, name: str, message: str) -> None:
    meta = {"a": "c", "n": 1, "list": [{"a": "d"}]}
    table = {"text": ["a"], "id": [1], "list": [["a"]], "meta": [meta], "title": ["b"]}
    with pytest.raises(InputError, match=message):
        read(write(tmp_path / "in", table), "text", name)


def test_cuts_and_flipped_bits_are_told_or_harmless(tmp_path: Path) -> None:
    path = write(tmp_path / "in", {"text": TEXTS}, row_group_size=25)
    whole = path.read_bytes()
    for length in range(0, len(whole), 23):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"in is damaged \(") as told:
            read(path, "text")
        assert "\n" not in str(told.value)
    for bit in random.Random(0).sample(range(8 * len(whole)), 400):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:
            read(path, "text")  # without checksums, another text cannot be told from this one
        except InputError as error:
            assert "\n" not in str(error)


def test_without_pyarrow_its_installation_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "in", {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match=r"in needs pyarrow, .*: pip install pyarrow$"):
        read(path, "text")
