import os
from pathlib import Path

import pytest

from moe_parallel.data.preprocess.inputs import find_inputs
from moe_parallel.errors import InputError

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


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in FILES:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("12345")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(*words: str) -> list[tuple[str, str]]:
    return [(str(each.path), each.domain) for each in find_inputs(words)]


def test_a_folder_is_read_at_any_depth_in_order_of_the_paths() -> None:
    assert found("data/prose", "data/code") == [
        ("data/prose/1.json.gz", "prose"),
        ("data/prose/2.JSONL.ZST", "prose"),
        ("data/code/a/z.parquet", "code"),
        ("data/code/b.jsonl", "code"),
    ]
    assert {domain for _, domain in found("data/../data/.")} == {"data"}


def test_plain_text_is_taken_from_a_folder_without_records() -> None:
    expected = ["data/books/1.TXT.xz", "data/books/part/2.txt"]
    assert found("data/books") == [(path, "books") for path in expected]
    assert [each.is_plain_text for each in find_inputs(["data/books"])] == [True, True]
    records, notes = find_inputs(["data/code/[bn]*.*"])
    assert notes.is_plain_text and not records.is_plain_text


def test_the_flag_is_an_argument() -> None:
    (file,) = find_inputs(["data/books/part"], "--text")
    assert str(file) == "--text data/books/part/2.txt"
    for words in (["gone"], ["*.gone"], ["data/empty"], ["data/books", "data/books/1.TXT.xz"]):
        with pytest.raises(InputError, match="^--text "):
            find_inputs(words, "--text")


def test_a_file_has_the_domain_of_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_pattern_takes_what_it_matches(pattern: str, files: list[str]) -> None:
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
def test_what_names_no_text_is_told(words: list[str], message: str) -> None:
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
