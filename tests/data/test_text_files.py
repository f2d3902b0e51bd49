"""Files, folders and patterns; plain text, JSON lines and Parquet, compressed or not."""

import bz2
import gzip
import hashlib
import lzma
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from moe_parallel.data import text_files
from moe_parallel.data.indexed import SourceFile
from moe_parallel.data.text_files import (
    Bad,
    Batch,
    Columns,
    InputFile,
    Record,
    find_inputs,
    read_batches,
    records,
)
from moe_parallel.errors import InputError
from moe_parallel.reading import rows_at_a_time

FILES = (
    "code/b.jsonl",
    "code/a/z.parquet",
    "code/.hidden.jsonl",
    "code/.cache/c.jsonl",
    "code/README.md",
    "code/dataset_info.json",
    "prose/1.json.gz",
    "prose/2.JSONL.ZST",
    "prose/old.json",
    "code/notes.txt",
    "books/part/2.txt",
    "books/1.TXT.xz",
    "books/cover.png",
    "empty/notes.md",
    "odd[1].jsonl",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in FILES:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("12345")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(*words: str) -> list[tuple[str, str]]:
    return [(str(each.path), each.domain) for each in find_inputs(words)]


def test_a_folder_is_read_at_any_depth_in_order_of_the_paths(folder: Path) -> None:
    assert found("data/prose", "data/code") == [
        ("data/prose/1.json.gz", "prose"),
        ("data/prose/2.JSONL.ZST", "prose"),
        ("data/code/a/z.parquet", "code"),
        ("data/code/b.jsonl", "code"),
    ]
    assert {domain for _, domain in found("data/../data/.")} == {"data"}


def test_plain_text_is_taken_from_a_folder_without_records(folder: Path) -> None:
    expected = ["data/books/1.TXT.xz", "data/books/part/2.txt"]
    assert found("data/books") == [(path, "books") for path in expected]
    assert [each.is_plain_text for each in find_inputs(["data/books"])] == [True, True]
    lines, notes = find_inputs(["data/code/[bn]*.*"])
    assert notes.is_plain_text and not lines.is_plain_text


def test_the_flag_is_an_argument(folder: Path) -> None:
    (file,) = find_inputs(["data/books/part"], "--text")
    assert str(file) == "--text data/books/part/2.txt"
    for words in (["gone"], ["*.gone"], ["data/empty"], ["data/books", "data/books/1.TXT.xz"]):
        with pytest.raises(InputError, match="^--text "):
            find_inputs(words, "--text")


def test_a_file_has_the_domain_of_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("data/prose/old.json", "data/code/README.md") == [
        ("data/prose/old.json", "prose"),
        ("data/code/README.md", "code"),
    ]
    monkeypatch.chdir("data/code")
    assert found("b.jsonl") == [("b.jsonl", "code")]


@pytest.mark.parametrize(
    ("pattern", "files"),
    [
        ("data/*/*.json*", ["code/b.jsonl", "code/dataset_info.json", "prose/1.json.gz",
                            "prose/old.json"]),
        ("data/**/*.parquet", ["code/a/z.parquet"]),
        ("data/prose/[0-9].*", ["prose/1.json.gz", "prose/2.JSONL.ZST"]),
        ("data/c?de", ["code/a/z.parquet", "code/b.jsonl"]),
        ("data/odd[1].jsonl", ["odd[1].jsonl"]),
    ],
)  # fmt: skip
def test_a_pattern_takes_what_it_matches(folder: Path, pattern: str, files: list[str]) -> None:
    paths = [path for path, _ in found(pattern)]
    assert sorted(paths) == [f"data/{name}" for name in files]
    for path, domain in found(pattern):
        assert domain == ("code" if "c?de" in pattern else Path(path).parent.name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data/empty"], r"--input data/empty is a folder without text: .*\.jsonl"),
        (["data/*.nope"], r"--input data/\*\.nope matches no file"),
        (["data/none"], r"--input data/none cannot be read \(No such file"),
        (["data/code", "data/code/b.jsonl"], r"--input names data/code/b\.jsonl twice"),
        (["data/loop"], r"--input data/loop cannot be read \(Too many levels"),
        (["data/gone"], r"--input data/gone cannot be read \(No such file"),
    ],
)
def test_what_names_no_text_is_told(folder: Path, words: list[str], message: str) -> None:
    os.symlink("loop", "data/loop")
    os.symlink("missing", "data/gone")
    with pytest.raises(InputError, match=message):
        find_inputs(words)


def test_the_same_file_by_another_name_is_told(folder: Path) -> None:
    os.symlink(folder / "data" / "code" / "b.jsonl", folder / "data" / "again.jsonl")
    with pytest.raises(InputError, match="twice"):
        find_inputs(["data/code", "data/again.jsonl"])


def test_sizes_are_known_of_files_alone(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    assert [each.size for each in find_inputs(["data/odd[1].jsonl", "pipe"])] == [5, None]


COLUMNS = Columns(("text",))
LIMIT = 24


def read(*paths: Path) -> tuple[list[Record | Bad], list[int]]:
    """The records of some files, and the bytes that were read for each batch."""
    found: list[Record | Bad] = []
    sizes = []
    for _, batch, size in read_batches(find_inputs([str(path) for path in paths]), COLUMNS):
        found += records(batch, COLUMNS)
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
    monkeypatch.setattr(text_files, "_BATCH", choose.choice([1, 3, 7, 16, LIMIT]))
    monkeypatch.setattr(text_files, "LONGEST", LIMIT)
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
    sources: list[SourceFile] = []
    found = list(read_batches(find_inputs([str(path) for path in paths]), COLUMNS, sources))
    assert [len(list(records(batch, COLUMNS))) for _, batch, _ in found] == [1, 1]
    assert sources == [
        SourceFile(str(path), path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in paths
    ]


@pytest.mark.parametrize("name", ["a.txt", "a.TXT.gz"])
def test_plain_text_is_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(text_files, "LONGEST", LIMIT)
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
    with pytest.raises(InputError, match="b.txt is plain text, which has no keys, and --json-keys"):
        next(read_batches(files, Columns(("text", "title"))))


LINES = b"".join(b'{"text": "%d"}\n' % random.Random(i).getrandbits(40) for i in range(60))


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def gz(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def parts(pack: Callable[[bytes], bytes]) -> bytes:
    """Two members or frames, as `cat a.gz b.gz` or a parallel compressor writes them."""
    return pack(LINES[:500]) + pack(LINES[500:])


def digested(path: Path) -> text_files._DigestedFile:
    return text_files._DigestedFile(InputFile(path, "text", None, "--input"))


def unpacked(path: Path) -> bytes:
    with digested(path) as file:
        return b"".join(text_files._unpacked(file))


PACKERS = {".gz": gz, ".zst": zst, ".bz2": bz2.compress, ".xz": lzma.compress}
FORMATS = {"": LINES, **{suffix: parts(pack) for suffix, pack in PACKERS.items()}}

every_packer = pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("named", [True, False])
def test_the_content_is_read_whatever_the_name(tmp_path: Path, suffix: str, named: bool) -> None:
    path = tmp_path / f"in.jsonl{suffix * named}"
    path.write_bytes(FORMATS[suffix])
    with digested(path) as file:
        assert b"".join(text_files._unpacked(file)) == LINES
        assert file.described().sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert file.count == path.stat().st_size


@every_packer
def test_every_cut_is_told(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "in"
    whole, boundary = parts(pack), len(pack(LINES[:500]))
    for length in {boundary, *range(4, len(whole), 7)}:
        path.write_bytes(whole[:length])
        if length == boundary:
            assert unpacked(path) == LINES[:500]
            continue
        with pytest.raises(InputError, match=rf"in is (truncated at {length}|damaged)"):
            unpacked(path)


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_bit_that_flips_is_told_or_changes_nothing(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in{suffix}"
    whole = PACKERS[suffix](LINES)
    for bit in random.Random(0).sample(range(8 * len(whole)), 250):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:
            assert unpacked(path) == LINES, bit
        except InputError as error:
            assert "\n" not in str(error)


@every_packer
def test_a_small_file_with_much_in_it_comes_in_blocks(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(pack(bytes(60 * 2**20)))
    assert path.stat().st_size < 2**18
    with digested(path) as file:
        sizes = [len(block) for block in text_files._unpacked(file)]
    assert sum(sizes) == 60 * 2**20 and max(sizes) <= 32 * 2**20


@pytest.mark.parametrize("suffix", [*PACKERS, ".parquet"])
@pytest.mark.parametrize("content", [b"", b"{}\n", *(pack(LINES) for pack in PACKERS.values())])
def test_a_file_that_is_not_what_its_name_says_is_told(
    tmp_path: Path, suffix: str, content: bytes
) -> None:
    path = tmp_path / f"in{suffix}"
    path.write_bytes(content)
    if suffix in PACKERS and content == PACKERS[suffix](LINES):
        assert unpacked(path) == LINES
        return
    with pytest.raises(InputError, match=rf"in{suffix} is not a {suffix} file"):
        digested(path)


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\)"):
        digested(tmp_path / "none")
    with pytest.raises(InputError, match=r"cannot be read \(Is a directory\)"):
        digested(tmp_path)


def test_without_zstandard_its_installation_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "in.zst").write_bytes(zst(LINES))
    with pytest.raises(InputError, match=r"in\.zst needs zstandard, .*: pip install zstandard$"):
        unpacked(tmp_path / "in.zst")


TEXTS = ["one", "", "naïve 漢字", None, *(f"text {i % 7}" for i in range(60))]


def written(path: Path, table: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(pyarrow.table(table), path, **options)
    return path


def opened(path: Path) -> InputFile:
    return InputFile(path, "text", path.stat().st_size, "--input")


def columns_of(path: Path, *names: str) -> list[list[bytes | None]]:
    rows = [row for some, _ in text_files._rows(opened(path), names) for row in some]
    return [[row[i] for row in rows] for i in range(len(names))]


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
    path = written(tmp_path / "in", table, row_group_size=25, compression=compression)
    expected = [None if text is None else text.encode() for text in TEXTS]
    titles, texts = columns_of(path, "title", "a.b")
    assert texts == expected
    assert titles == [f"t{i}".encode() for i in numbers]


def test_fields_in_columns_have_dotted_names(tmp_path: Path) -> None:
    inner = [{"b": "1"}, None, {"b": None}, {"b": "4"}]
    rows = [{"source": f"s{i}", "of": each} for i, each in enumerate(inner)]
    table = {"meta": [*rows, None], "meta.source": list("vwxyz"), "text": list("abcde")}
    path = written(tmp_path / "in", table, row_group_size=2)
    letters = [[each.encode() for each in word] for word in ("vwxyz", "abcde")]
    expected = [[b"1", None, None, b"4", None], *letters]
    assert columns_of(path, "meta.of.b", "meta.source", "text") == expected
    del table["meta.source"]
    path = written(tmp_path / "other", table, row_group_size=2)
    assert columns_of(path, "meta.source") == [[b"s0", b"s1", b"s2", b"s3", None]]


@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
def test_rows_come_in_order_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(text_files, "_ROWS", rows)
    path = written(tmp_path / "in", {"text": [str(i) for i in range(300)]}, row_group_size=64)
    found, shares = [], []
    for values, share in text_files._rows(opened(path), ["text"]):
        assert 1 <= len(values) <= rows
        found += [value for (value,) in values]
        shares.append(share)
    assert found == [b"%d" % i for i in range(300)]
    assert shares == sorted(shares) and shares[-1] == 1


def test_long_texts_come_a_few_at_a_time(tmp_path: Path) -> None:
    texts = [random.Random(i).randbytes(100_000) for i in range(40)]
    path = written(tmp_path / "in", {"text": texts})
    batches = [
        [text for (text,) in values] for values, _ in text_files._rows(opened(path), ["text"])
    ]
    assert [text for batch in batches for text in batch] == texts
    assert max(map(len, batches)) <= 5


def test_a_text_that_all_rows_share_is_read_some_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = pyarrow.array(["x" * 2**20]).dictionary_encode().take([0] * 60)
    path = written(tmp_path / "in", {"text": texts}, compression="zstd", store_schema=False)
    assert path.stat().st_size < 2**10
    monkeypatch.setattr("moe_parallel.reading.MOST_OF_ROWS", 2**23)
    before, rows = pyarrow.total_allocated_bytes(), 0
    for values, _ in text_files._rows(opened(path), ["text"]):
        rows += len(values)
        assert len(values) == 1 and pyarrow.total_allocated_bytes() - before < 2**25
    assert rows == 60


def test_long_texts_are_read_some_rows_at_a_time_whatever_a_footer_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = pyarrow.array([b"x" * 2**20], pyarrow.binary(2**20))
    metadata = parquet.read_metadata(written(tmp_path / "wide", {"text": ["a"], "wide": wide}))
    monkeypatch.setattr("moe_parallel.reading.MOST_OF_ROWS", 2**22)
    assert rows_at_a_time(metadata) <= 4
    lie = parquet.read_metadata(written(tmp_path / "in", {"text": ["a"]}))  # by which all are short
    assert rows_at_a_time(lie) == 64


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    assert columns_of(
        written(tmp_path / "in", {"text": pyarrow.array([], pyarrow.string())}), "text"
    ) == [[]]


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
        columns_of(written(tmp_path / "in", table), "text", name)


def test_cuts_and_flipped_bits_are_told_or_harmless(tmp_path: Path) -> None:
    path = written(tmp_path / "in", {"text": TEXTS}, row_group_size=25)
    whole = path.read_bytes()
    for length in range(0, len(whole), 23):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"in is damaged \(") as told:
            columns_of(path, "text")
        assert "\n" not in str(told.value)
    for bit in random.Random(0).sample(range(8 * len(whole)), 400):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:
            columns_of(path, "text")  # without checksums, another text cannot be told from this one
        except InputError as error:
            assert "\n" not in str(error)


def test_without_pyarrow_its_installation_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "in", {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match=r"in needs pyarrow, .*: pip install pyarrow$"):
        columns_of(path, "text")


TEXT = Columns(("text",))
CONVERT = "convert it, as iconv -f latin1 -t utf-8 does"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "not JSON (Expecting ',' delimiter, column 13)"),
        (b"[1]", "not a JSON object: expected one {...} per line"),
        (b'{"body": "a", "id": 1}', "no key 'text' (its keys: 'body', 'id'): see --json-keys"),
        (b"{}", "no key 'text' (its keys: none): see --json-keys"),
        (b'{"text": 7}', "int, not text, under 'text'"),
        (b'{"text": null}', "NoneType, not text, under 'text'"),
        (b'{"text": "\xff"}', f"not UTF-8 (byte 11): {CONVERT}"),
        ('{"text": "a"}'.encode("utf-16"), f"not UTF-8 (byte 1): {CONVERT}"),
        (b'{"text": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"text": ' + b"9" * 5_000 + b"}", "a number with too many digits"),
    ],
)
def test_a_bad_line_has_its_number_and_a_reason(line: bytes, reason: str) -> None:
    batch = Batch("line", 7, "d", b'{"text": "fine"}\n' + line.replace(b"\n", b" ") + b"\n{}")
    good, bad, _ = records(batch, TEXT)
    assert good == Record(7, ["fine"], "d")
    assert bad == Bad(8, reason)


def test_the_keys_of_a_stranger_do_not_fill_the_screen() -> None:
    line = b"{" + b", ".join(b'"%s%d": 1' % (b"k" * 10_000, i) for i in range(100)) + b"}"
    (bad,) = records(Batch("line", 1, "d", line), TEXT)
    assert isinstance(bad, Bad) and len(bad.reason) < 600 and "..." in bad.reason


def test_texts_come_in_the_order_of_the_keys() -> None:
    columns = Columns(("title", "text"), domain="source")
    line = b'{"text": "b", "source": "web", "title": "a"}'
    assert list(records(Batch("line", 1, "d", line), columns)) == [Record(1, ["a", "b"], "web")]
    rows = Batch("row", 3, "d", [(b"a", b"b", b"web"), (b"\xff", b"b", None)])
    assert list(records(rows, columns)) == [
        Record(3, ["a", "b"], "web"),
        Bad(4, f"not UTF-8 under 'title' (byte 1): {CONVERT}"),
    ]


def test_a_domain_is_a_text() -> None:
    columns = Columns(("text",), domain="source")
    lines = Batch("line", 1, "d", b'{"text": "a"}\n{"text": "a", "source": 3}')
    bad = list(records(lines, columns))
    assert bad == [
        Bad(1, "no key 'source' (its keys: 'text'): see --json-keys"),
        Bad(2, "int, not text, under 'source'"),
    ]
    assert list(records(Batch("row", 1, "d", [(b"a", None)]), columns)) == [
        Bad(1, "no text under 'source' (null)")
    ]


def test_keys_of_inner_objects() -> None:
    line = b'{"meta": {"of": {"web": "a"}, "n": 1}, "meta.n": "b", "text": "c"}'
    columns = Columns(("meta.of.web", "meta.n", "text"))
    assert list(records(Batch("line", 1, "d", line), columns)) == [Record(1, ["a", "b", "c"], "d")]
    for key in ("meta.off", "text.a", "meta.of.web.a"):
        (bad,) = records(Batch("line", 1, "d", line), Columns((key,)))
        keys = "'meta', 'meta.n', 'text'"
        assert bad == Bad(1, f"no key {key!r} (its keys: {keys}): see --json-keys")


def test_plain_text_is_one_document_under_any_key() -> None:
    columns = Columns(("body",), domain="source")
    assert list(records(Batch("document", 1, "d", b"a\r\nb\n"), columns)) == [
        Record(1, ["a\r\nb\n"], "d")
    ]
    assert list(records(Batch("document", 1, "d", b"ab\xff"), columns)) == [
        Bad(1, f"not UTF-8 (byte 3): {CONVERT}")
    ]
