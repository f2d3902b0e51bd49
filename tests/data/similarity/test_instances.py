"""Instances, and the samples that Megatron's GPTDataset builds from them."""

from pathlib import Path

import numpy as np
import pytest

from moe_parallel.data.datasets import build_datasets
from moe_parallel.data.indexed import write_indexed
from moe_parallel.data.similarity.documents import Documents
from moe_parallel.data.similarity.instances import Instances
from moe_parallel.data.sources import Source
from moe_parallel.errors import InputError
from tests.data.small_text import NUMBERS

S = 16
EOD = NUMBERS.eod


def numbered(folder: Path, lengths: list[int]) -> Documents:
    """Every token except the ends is a different number, so its origin is known."""
    ends = np.cumsum(lengths)
    bodies = [list(range(end - n, end)) for n, end in zip(lengths, ends, strict=True)]
    write_indexed(folder / "in", [[*body, EOD] for body in bodies], NUMBERS.vocab_size)
    return Documents(str(folder / "in"))


def joined(documents: Documents, order: np.ndarray) -> list[int]:
    return [token for i in order for token in documents[i].tolist()]


def samples(prefix: Path, count: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of the samples that training reads."""
    data = build_datasets(
        [Source("data", None, str(prefix), str(prefix), "1,0,0")],
        tokenizer=NUMBERS,
        seq_length=S,
        train_samples=count,
        seed=3,
        cache_folder=prefix.parent / "cache",
    )
    read = [data.train[i] for i in range(count)]
    return [(sample["tokens"].tolist(), sample["labels"].tolist()) for sample in read]


@pytest.mark.parametrize("per_piece", [1, 3, 100])
def test_pieces_are_the_text_in_order(tmp_path: Path, per_piece: int) -> None:
    documents = numbered(tmp_path, [20, 3, 0, 70, 1, 40, 9])
    order = np.array([3, 0, 2, 6, 5, 1])  # document 4 is missing
    text = joined(documents, order)
    pieces = Instances(documents, order, S, per_piece)
    assert (pieces.count, pieces.left_out) == (len(text) // S, len(text) % S)
    found = [pieces[i].tolist() for i in range(len(pieces))]
    assert sum(found, []) == text[: pieces.count * S]
    assert {len(piece) for piece in found[:-1]} <= {S * per_piece}
    assert len(found[-1]) % S == 0


def test_shuffled_is_a_permutation_that_the_seed_gives(tmp_path: Path) -> None:
    pieces = Instances(numbered(tmp_path, [300, 200]), np.array([1, 0]), S, 2)
    first, again, other = (
        [piece.tolist() for piece in pieces.shuffled(seed)] for seed in (0, 0, 1)
    )
    assert first == again != other
    assert sorted(first) == sorted(other) == sorted(pieces[i].tolist() for i in range(len(pieces)))


def test_too_little_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--seq-length 16 is longer than the text.* 14 tokens"):
        Instances(numbered(tmp_path, [7, 5]), np.array([0, 1]), S, 1)


@pytest.mark.parametrize("per_piece", [1, 4])
def test_every_sample_of_training_is_an_instance(tmp_path: Path, per_piece: int) -> None:
    documents = numbered(tmp_path, [50, 61, 33, 120, 7, 90, 18, 200])
    order = np.array([4, 2, 0, 7, 5, 1, 3, 6])
    pieces = Instances(documents, order, S, per_piece)
    text = joined(documents, order)
    write_indexed(
        tmp_path / "out", (piece.tolist() for piece in pieces.shuffled(1)), NUMBERS.vocab_size
    )
    number = {tuple(text[i * S : i * S + S]): i for i in range(pieces.count)}
    assert len(number) == pieces.count
    epochs = 3  # the very last sample has no label for its last token and is not built
    read = samples(tmp_path / "out", epochs * pieces.count - 1)
    seen = [number[tuple(tokens)] for tokens, _ in read]
    # Training may complete one epoch's order before the next, so each occurs 2 to 3 times.
    assert sorted(np.bincount(seen, minlength=pieces.count))[0] >= epochs - 1
    assert seen != sorted(seen)
    for instance, (_, labels) in zip(seen, read, strict=True):
        start = instance * S
        assert labels[:-1] == text[start + 1 : start + S]
        last_of_piece = (instance + 1) % per_piece == 0 or instance == pieces.count - 1
        if not last_of_piece:
            assert labels[-1] == text[start + S]


def test_documents_of_one_token_more_would_drift(tmp_path: Path) -> None:
    """The reason that instances are not written with the label of their last token."""
    text = list(range(50 * (S + 1)))
    longer = [text[i : i + S + 1] for i in range(0, len(text), S + 1)]
    write_indexed(tmp_path / "out", longer, NUMBERS.vocab_size)
    whole = {tuple(each[:S]) for each in longer}
    read = samples(tmp_path / "out", 50)
    assert sum(tuple(tokens) in whole for tokens, _ in read) <= 5
