"""The comparison at the end of a run: its numbers, and its limit on the text that is read."""

from pathlib import Path

import pytest

from moe_parallel.data.datasets import Datasets, Source, build_datasets
from moe_parallel.data.tokenizer import FastTokenizer
from moe_parallel.evaluation.baselines import ByteModel, joined
from moe_parallel.evaluation.text_loss import TextLoss
from moe_parallel.training import pretrain as final_report
from moe_parallel.training.pretrain import ByteComparison, compare_with_baselines, format_table
from tests.data.small_text import small_bpe, words, write_texts

TRAIN = {"a": [words(30, i) for i in range(9)], "b": [words(40, 50 + i) for i in range(7)]}
VALID = {"a": [words(30, 90), words(9, 91)], "b": ["of another kind " + words(30, 92)]}
MEASURED = {"a": TextLoss(700.0, 100, 300), "b": TextLoss(900.0, 90, 200)}


@pytest.fixture(scope="module")
def bpe() -> FastTokenizer:
    return small_bpe()


def datasets(folder: Path, bpe: FastTokenizer, domains: str) -> Datasets:
    sources = [
        Source(
            name,
            None,
            write_texts(folder / f"{name}_train", TRAIN[name], bpe),
            write_texts(folder / f"{name}_valid", VALID[name], bpe),
            None,
        )
        for name in domains
    ]
    return build_datasets(
        sources,
        tokenizer=bpe,
        seq_length=16,
        train_samples=10,
        seed=1,
        cache_folder=folder / "cache",
    )


def compare(folder: Path, bpe: FastTokenizer, domains: str, **limit: int) -> ByteComparison:
    measured = {name: MEASURED[name] for name in domains}
    return compare_with_baselines(measured, datasets(folder, bpe, domains), bpe, **limit)


def bits_per_byte(train: list[str], held_out: list[str]) -> float:
    data = joined(held_out)
    return ByteModel([joined(train)], 3).bits(data) / len(data)


@pytest.mark.full
def test_all_training_text_against_each_held_out_text_and_all(
    tmp_path: Path, bpe: FastTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    train_trigram = final_report.train_trigram
    monkeypatch.setattr(
        final_report, "train_trigram", lambda texts: trained.append(1) or train_trigram(texts)
    )
    comparison = compare(tmp_path, bpe, "ab")
    assert trained == [1], "one model for all rows"
    assert comparison.note == ""
    train = TRAIN["a"] + TRAIN["b"]
    held_out = {**VALID, "all": VALID["a"] + VALID["b"]}
    assert list(comparison.rows) == ["a", "b", "all"]
    for name, texts in held_out.items():
        row = comparison.rows[name]
        assert row["trigram"] == pytest.approx(bits_per_byte(train, texts), rel=1e-12)
    assert comparison.rows["all"]["model"] == TextLoss(1600.0, 190, 500).bits_per_byte


def test_one_domain_is_one_row(tmp_path: Path, bpe: FastTokenizer) -> None:
    comparison = compare(tmp_path, bpe, "b")
    assert list(comparison.rows) == ["b"]
    expected = bits_per_byte(TRAIN["b"], VALID["b"])
    assert comparison.rows["b"]["trigram"] == pytest.approx(expected, rel=1e-12)
    head, row = format_table(comparison).splitlines()
    assert head.split() == "bits per byte model unigram trigram xz -9".split()
    assert row.split()[0] == "b" and len(row.split()) == 5


def test_a_large_corpus_is_read_in_part_and_the_table_says_so(
    tmp_path: Path, bpe: FastTokenizer
) -> None:
    share = len(joined(TRAIN["a"][:2])) + 1  # reached by the third document
    read_of_b: list[str] = []
    while len(joined(read_of_b)) < share:
        read_of_b.append(TRAIN["b"][len(read_of_b)])
    comparison = compare(tmp_path, bpe, "ab", train_bytes=2 * share)
    expected = bits_per_byte(TRAIN["a"][:3] + read_of_b, VALID["a"])
    assert comparison.rows["a"]["trigram"] == pytest.approx(expected, rel=1e-12)
    *_, note = format_table(comparison).splitlines()
    size = f"{share / 2**20:.4g} MiB"
    assert note == f"unigram, trigram: of the first {size} of training text of each domain"


def test_text_that_just_fits_is_not_called_a_part(tmp_path: Path, bpe: FastTokenizer) -> None:
    size = len(joined(TRAIN["a"]))
    assert compare(tmp_path, bpe, "a", train_bytes=size).note == ""
    assert compare(tmp_path, bpe, "a", train_bytes=size - len(TRAIN["a"][-1].encode())).note
