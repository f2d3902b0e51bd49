"""The corpus of a made-up standard library: which text it has, and in which part."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from moe_parallel.data import corpus as embedded
from moe_parallel.data.corpus import (
    DOMAINS,
    SIDES,
    Document,
    content_key,
    drop_near_copies,
    prepare_default_corpus,
    python_corpus,
    side_of_document,
)
from moe_parallel.data.indexed import check_indexed
from moe_parallel.data.tokenizer import load_tokenizer
from moe_parallel.errors import InputError
from tests.data.small_text import words


def source(name: str, docstring: str) -> str:
    """A module in which every line is unique."""
    lines = "\n".join(f"    {name}_{i} = {i} + len('{name}')" for i in range(20))
    return f'"""{docstring}"""\n\n\ndef work_{name}(x):\n    """Does {name}."""\n{lines}\n'


@pytest.fixture
def stdlib(tmp_path: Path) -> Path:
    for i in range(60):
        (tmp_path / f"module{i}.py").write_text(source(f"m{i}", f"About {i}: {words(8, i)}"))
    folder = tmp_path / "pydoc_data"
    folder.mkdir()
    topics = {f"topic{i}": f"Topic {i}\n\n{words(30, 100 + i)}" for i in range(30)}
    (folder / "topics.py").write_text(f"# generated\ntopics = {topics!r}\n")
    return tmp_path


def test_every_text_is_on_one_side_of_its_domain(stdlib: Path) -> None:
    corpus = python_corpus(0.3, stdlib)
    for i in range(60):
        marker = f"def work_m{i}(x)"
        found = [side for side in SIDES if any(marker in t for t in corpus["code", side])]
        assert len(found) == 1
        # The docstrings of the module follow it.
        about = f"About {i}: "
        assert [side for side in SIDES if any(about in t for t in corpus["prose", side])] == found
    topics = [t for side in SIDES for t in corpus["prose", side] if t.startswith("Topic")]
    assert len(topics) == 30
    assert all(corpus[domain, "valid"] for domain in ("code", "prose"))


def test_the_fraction_is_the_share_of_hashes_held_out() -> None:
    keys = [content_key(str(i)) for i in range(20_000)]
    held_out = {key for key in keys if side_of_document(key, 0.1) == "valid"}
    assert len(held_out) == pytest.approx(2000, abs=5 * (20_000 * 0.1 * 0.9) ** 0.5)
    # A larger fraction only moves texts from training to validation.
    assert held_out < {key for key in keys if side_of_document(key, 0.2) == "valid"}


def test_what_is_left_out(stdlib: Path) -> None:
    """By its place, and what is not Python text."""
    for path in ("test/test_it.py", "tkinter/test/it.py", "site-packages/it.py", "pydoc_data/it.py",
                 "_sysconfigdata__linux_.py"):  # fmt: skip
        (stdlib / path).parent.mkdir(parents=True, exist_ok=True)
        (stdlib / path).write_text(source("outsider", "An outsider."))
    (stdlib / "wrong_encoding.py").write_bytes(b"outsider = '\xff'\n")
    (stdlib / "wrong_syntax.py").write_text("outsider = (\n")
    (stdlib / "declared.py").write_bytes(
        b"# -*- coding: latin-1 -*-\n" + source("latin", "Caf\xe9.").encode("latin-1")
    )
    everything = "".join(t for texts in python_corpus(0.3, stdlib).values() for t in texts)
    assert "outsider" not in everything
    assert "Café." in everything


def test_a_docstring_of_both_sides_is_in_no_prose(stdlib: Path) -> None:
    for i in range(30):
        (stdlib / f"copy{i}.py").write_text(source(f"c{i}", "Everyone says this."))
    corpus = python_corpus(0.3, stdlib)
    for side in SIDES:
        assert any("Everyone says this." in text for text in corpus["code", side])
        assert not any("Everyone says this." in text for text in corpus["prose", side])


def document(name: str, lines: list[str]) -> Document:
    text = "\n".join(lines) + "\n"
    return Document("code", name, text, content_key(text))


def test_near_copies_go_and_the_longest_stays() -> None:
    lines = [f"line number {i:02d} of the long one" for i in range(20)]
    long = document("long", lines)
    copy = document("copy", lines)
    chapter = document("chapter", ["    " + line for line in lines[5:12]] + ["a line of its own"])
    kin = document("kin", lines[:5] + [f"line number {i:02d} of another" for i in range(20)])
    other = document("other", ["nothing", "alike"])
    kept = drop_near_copies([chapter, other, long, copy, kin])
    assert [d.name for d in kept] == ["other", "long", "kin"]
    assert drop_near_copies([document("empty", ["", "   "])]) == []


def test_a_python_without_sources_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no train text.*give --data-path"):
        python_corpus(0.04, tmp_path)
    with pytest.raises(InputError, match=r"fraction 1\.5 must lie between 0 and 1"):
        python_corpus(1.5, tmp_path)


TEXTS = {
    (domain, side): [f"{domain} {side} {words(200, 10 * i + j)}" for i in range(count)]
    for j, domain in enumerate(DOMAINS)
    for side, count in zip(SIDES, (5, 2), strict=True)
}


@pytest.fixture
def small_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python with little text, so that the corpus is built quickly."""
    monkeypatch.setattr(embedded, "python_corpus", lambda fraction: TEXTS)


@pytest.mark.usefixtures("small_python")
def test_what_is_built_is_the_text(tmp_path: Path) -> None:
    corpus = prepare_default_corpus(tmp_path, 300)
    tokenizer = load_tokenizer(corpus.tokenizer_folder)
    assert tokenizer.vocab_size == 300
    for (domain, side), texts in TEXTS.items():
        prefix = corpus.prefix(domain, side)
        lengths = check_indexed(prefix, 300)
        ids = np.fromfile(f"{prefix}.bin", dtype=np.uint16)
        documents = np.split(ids, np.cumsum(lengths)[:-1])
        assert [tokenizer.detokenize(d[:-1]) for d in documents] == texts


@pytest.mark.usefixtures("small_python")
def test_a_second_call_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare_default_corpus(tmp_path, 300)

    def fail(*arguments: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(embedded, "_build", fail)
    assert prepare_default_corpus(tmp_path, 300) == first
    with pytest.raises(AssertionError, match="built again"):
        prepare_default_corpus(tmp_path, 301)


def build_slowly(directory: Path, started: str) -> None:
    """In a separate process: report the start of the build, then take some time."""
    build = embedded._build

    def slow(corpus, vocab_size, valid_fraction):
        (corpus.folder / "half").write_text("written")
        Path(started).touch()
        time.sleep(60 if started.endswith("killed") else 0.5)
        (corpus.folder / "half").unlink()
        build(corpus, vocab_size, valid_fraction)

    embedded.python_corpus = lambda fraction: TEXTS
    embedded._build = slow
    prepare_default_corpus(directory, 300)


def start(directory: Path, started: Path) -> multiprocessing.Process:
    context = multiprocessing.get_context("fork")
    process = context.Process(target=build_slowly, args=(directory, str(started)))
    process.start()
    return process


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


@pytest.mark.usefixtures("small_python")
def test_a_builder_that_is_killed_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    process = start(tmp_path / "data", tmp_path / "killed")
    wait_for(tmp_path / "killed")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert list((tmp_path / "data").glob(".*building*"))
    corpus = prepare_default_corpus(tmp_path / "data", 300)
    assert load_tokenizer(corpus.tokenizer_folder).vocab_size == 300
    assert not list((tmp_path / "data").glob(".*building*"))


@pytest.mark.usefixtures("small_python")
def test_two_builders_at_once_build_once(tmp_path: Path) -> None:
    process = start(tmp_path / "data", tmp_path / "started")
    wait_for(tmp_path / "started")
    corpus = prepare_default_corpus(tmp_path / "data", 300)  # waits for the other process
    process.join()
    assert process.exitcode == 0
    assert load_tokenizer(corpus.tokenizer_folder).vocab_size == 300
    assert not (corpus.folder / "half").exists()
