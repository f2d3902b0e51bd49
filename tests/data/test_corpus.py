"""The corpus of a made-up standard library: which text it has, and in which part."""

import random
from pathlib import Path

import pytest

from moe_parallel.data.corpus import (
    SIDES,
    Document,
    content_key,
    drop_near_copies,
    python_corpus,
    shared_lines,
    side_of_document,
)
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


@pytest.mark.full
def test_the_corpus_of_this_python_has_text_on_every_side() -> None:
    for texts in python_corpus(0.04).values():
        assert sum(map(len, texts)) > 1000


def test_the_fraction_is_the_share_of_hashes_held_out() -> None:
    keys = [content_key(str(i)) for i in range(20_000)]
    held_out = sum(side_of_document(key, 0.1) == "valid" for key in keys)
    assert held_out == pytest.approx(2000, abs=5 * (20_000 * 0.1 * 0.9) ** 0.5)


def test_a_larger_fraction_only_moves_texts_from_training_to_validation() -> None:
    keys = [content_key(str(i)) for i in range(2000)]
    few = {key for key in keys if side_of_document(key, 0.02) == "valid"}
    many = {key for key in keys if side_of_document(key, 0.05) == "valid"}
    assert few < many


@pytest.mark.parametrize(
    "path",
    [
        "test/test_it.py",
        "tkinter/test/it.py",
        "site-packages/it.py",
        "pydoc_data/it.py",
        "_sysconfigdata__linux_.py",
    ],
)
def test_what_is_left_out_by_its_place(stdlib: Path, path: str) -> None:
    file = stdlib / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source("outsider", "An outsider."))
    assert not any(
        "outsider" in text for texts in python_corpus(0.3, stdlib).values() for text in texts
    )


def test_what_is_not_python_text_is_left_out(stdlib: Path) -> None:
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


def test_a_docstring_is_in_prose_once(stdlib: Path) -> None:
    twice = '"""Same words."""\n' + source("x", "X.") + 'class B:\n    """Same words."""\n'
    (stdlib / "twice.py").write_text(twice)
    corpus = python_corpus(0.3, stdlib)
    assert sum(t.count("Same words.") for side in SIDES for t in corpus["prose", side]) == 1


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


def test_an_empty_text_is_dropped() -> None:
    assert drop_near_copies([document("empty", ["", "   "])]) == []


def test_shared_lines_by_hand() -> None:
    shared = "x" * 50
    assert shared_lines([f"a\n{shared}\nb"], [f"{shared}\n" + "y" * 49]) == pytest.approx(0.5)
    assert shared_lines(["short\n"], ["short\n"]) == 0.0


def test_the_order_of_the_corpus_is_fixed(stdlib: Path, tmp_path: Path) -> None:
    before = python_corpus(0.3, stdlib)
    for file in random.Random(0).sample(sorted(stdlib.glob("*.py")), 60):
        file.rename(file.with_suffix(".moved"))
        file.with_suffix(".moved").rename(file)
    assert python_corpus(0.3, stdlib) == before


def test_a_python_without_sources_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no train text.*give --data-path"):
        python_corpus(0.04, tmp_path)
    with pytest.raises(InputError, match=r"fraction 1\.5 must lie between 0 and 1"):
        python_corpus(1.5, tmp_path)
