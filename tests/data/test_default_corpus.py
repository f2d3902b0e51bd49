import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from moe_parallel.data import corpus as embedded
from moe_parallel.data.corpus import DOMAINS, SIDES, content_key, prepare_default_corpus
from moe_parallel.data.indexed import check_indexed
from moe_parallel.data.tokenizer import load_tokenizer
from moe_parallel.errors import InputError
from tests.data.small_text import words

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
def test_what_is_built_is_what_the_manifest_says(tmp_path: Path) -> None:
    corpus = prepare_default_corpus(tmp_path, 300)
    tokenizer = load_tokenizer(corpus.tokenizer_folder)
    manifest = corpus.manifest
    assert manifest["vocab_size"] == tokenizer.vocab_size == 300
    assert len(manifest["corpus_sha256"]) == len(content_key(""))
    for (domain, side), texts in TEXTS.items():
        prefix = corpus.prefix(domain, side)
        lengths = check_indexed(prefix, 300)
        ids = np.fromfile(f"{prefix}.bin", dtype=np.uint16)
        sizes = manifest["domains"][domain][side]
        size = sum(len(text.encode()) for text in texts)
        assert sizes == {"documents": len(texts), "bytes": size, "tokens": int(lengths.sum())}
        assert tokenizer.bytes_per_token[ids].sum() == size
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
    assert corpus.manifest["vocab_size"] == 300
    assert not list((tmp_path / "data").glob(".*building*"))


@pytest.mark.usefixtures("small_python")
def test_two_builders_at_once_build_once(tmp_path: Path) -> None:
    process = start(tmp_path / "data", tmp_path / "started")
    wait_for(tmp_path / "started")
    corpus = prepare_default_corpus(tmp_path / "data", 300)  # waits for the other process
    process.join()
    assert process.exitcode == 0
    assert json.loads((corpus.folder / "manifest.json").read_text())["vocab_size"] == 300
    assert not (corpus.folder / "half").exists()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    with pytest.raises(InputError, match=r"--data-cache-path \S*file/data cannot be written"):
        prepare_default_corpus(in_the_way / "data", 300)


def test_a_vocabulary_that_is_too_small_builds_nothing(tmp_path: Path, small_python: None) -> None:
    with pytest.raises(InputError, match=r"--vocab-size 100 is too small"):
        prepare_default_corpus(tmp_path, 100)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.usefixtures("small_python")
def test_a_corpus_with_a_file_gone_says_how_to_mend_it(tmp_path: Path) -> None:
    corpus = prepare_default_corpus(tmp_path, 300)
    prefix = corpus.prefix("code", "train")
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(InputError, match=r"code_train\.bin is missing; delete the folder"):
        check_indexed(prefix, 300)
