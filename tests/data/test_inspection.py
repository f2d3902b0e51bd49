from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from moe_parallel.data.indexed import write_indexed
from moe_parallel.data.inspection import (
    Inspected,
    histogram,
    inspected,
    printable,
    repeats,
)
from moe_parallel.data.tokenizer import NullTokenizer, Tokenizer
from moe_parallel.errors import InputError
from tests.data.small_text import NUMBERS, small_bpe, write_texts


@contextmanager
def no_progress(label: str, total: int) -> Iterator[Callable[[int], object]]:
    yield lambda count: None


def report(
    tokenizer: Tokenizer | None,
    *prefixes: Path,
    samples: int = 0,
    documents: list[int] | None = None,
    characters: int = 100,
    seed: int = 1,
) -> list[str]:
    """The lines about the last of some datasets."""
    flags = Namespace(
        data_path=[str(prefix) for prefix in prefixes], samples=samples, documents=documents,
        characters=characters, seed=seed,
    )  # fmt: skip
    return list(inspected(flags, tokenizer, no_progress))[-1][1]


def test_documents_are_decoded(tmp_path: Path) -> None:
    bpe = small_bpe()
    write_texts(tmp_path / "data", ["the expert\nreads", "x" * 50, "naïve 漢字"], bpe)
    lines = report(bpe, tmp_path / "data", documents=[0, 1, 2], characters=20)
    assert lines[-7:] == [
        f"document 0, {len(bpe.tokenize('the expert' + chr(10) + 'reads')) + 1} tokens:",
        "  | the expert",
        "  | reads<|en ...",
        f"document 1, {len(bpe.tokenize('x' * 50)) + 1} tokens:",
        "  | " + "x" * 20 + " ...",
        f"document 2, {len(bpe.tokenize('naïve 漢字')) + 1} tokens:",
        "  | naïve 漢字<|endoftext|" + " ...",
    ]
    ids = report(None, tmp_path / "data", documents=[2], characters=500)[-1]
    assert ids.split()[1:] == [str(i) for i in [*bpe.tokenize("naïve 漢字"), bpe.eod]]


def test_lengths_and_ends_are_counted(tmp_path: Path) -> None:
    lengths = [1] * 45 + [3] * 30 + [10] * 24 + [1000]
    write_indexed(tmp_path / "data", [[7] * (n - 1) + [999] for n in lengths[:-1]] + [[7] * 1000],
                  NUMBERS.vocab_size, tokenizer=NUMBERS.fingerprint)  # fmt: skip
    lines = report(NUMBERS, tmp_path / "data")
    assert lines[0] == "100 documents, 1,375 tokens of type uint16"
    assert "last token 999, the end of document: 99 documents" in lines
    assert (
        "tokens per document: mean 13.8, shortest 1, 1% 1, 25% 1, median 3, 75% 3, 99% 10, "
        "longest 1,000"
    ) in lines


def test_a_histogram_has_a_line_for_each_power_of_two() -> None:
    lines = histogram(np.array([1] * 8 + [4, 5, 7, 7] + [8]))
    assert [line.split() for line in lines] == [
        ["1", "-", "1", "8", "#" * 40],
        ["2", "-", "3", "0"],
        ["4", "-", "7", "4", "#" * 20],
        ["8", "-", "15", "1", "#" * 5],
    ]
    assert [line.split()[:4] for line in histogram(np.array([0, 65_536]))][::17] == [
        ["0", "-", "0", "1"],
        ["65,536", "-", "131,071", "1"],
    ]


def test_repeats_are_found_with_and_without_the_end_and_in_any_type(tmp_path: Path) -> None:
    big = NullTokenizer(100_000)  # int32, the others uint16
    write_indexed(tmp_path / "a", [[1, 2, 9], [3, 9], [1, 2], [3, 9], [3, 9], [2, 1, 9]], 10)
    write_indexed(tmp_path / "b", [[5, 99_999], [3, 99_999]], big.vocab_size)
    lines = report(None, tmp_path / "a", tmp_path / "b")
    assert "0 repeated documents (0.0%)" in lines
    assert f"1 document (50.0%) also in {tmp_path / 'a'}" in lines
    assert "3 repeated documents (50.0%); document 1 occurs 3 times" in report(None, tmp_path / "a")


def test_repeats_of_nothing() -> None:
    assert repeats(np.array([5, 6], np.uint64)) == "0 repeated documents (0.0%)"


def test_control_characters_are_shown_not_sent() -> None:
    assert printable("a\x1b[2Jb\r\n\x07é漢\u202e") == "a\\x1b[2Jb\\r\n\\x07é漢\\u202e"


def test_samples_are_random_and_the_same_again(tmp_path: Path) -> None:
    write_indexed(tmp_path / "data", [[i, 999] for i in range(500)], NUMBERS.vocab_size)

    def shown(samples: int, seed: int) -> list[int]:
        lines = report(NUMBERS, tmp_path / "data", samples=samples, seed=seed)
        return [int(line.split()[1][:-1]) for line in lines if line.startswith("document ")]

    first, again, other = (shown(5, seed) for seed in (1, 1, 2))
    assert first == again == sorted(set(first)) and len(first) == 5
    assert other != first
    assert len(shown(1000, 1)) == 500
    with pytest.raises(InputError, match=r"--documents 500: \S+ has 500; .* from 0 to 499"):
        report(NUMBERS, tmp_path / "data", documents=[3, 500])


def test_another_tokenizer_is_told(tmp_path: Path) -> None:
    bpe = small_bpe()
    write_texts(tmp_path / "data", ["the expert"], bpe)
    with pytest.raises(InputError, match=rf"another tokenizer, .* {bpe.fingerprint[:12]}, and"):
        Inspected(str(tmp_path / "data"), small_bpe(290))
    with pytest.raises(InputError, match=r"--data-path \S+none: \S+none\.idx is missing"):
        Inspected(str(tmp_path / "none"), bpe)
