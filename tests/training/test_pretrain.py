"""What a run warns of before it trains, and the comparison at its end."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_parallel.config import make_config
from moe_parallel.data.datasets import Datasets, Source, build_datasets
from moe_parallel.data.tokenizer import FastTokenizer
from moe_parallel.evaluation.baselines import ByteModel, joined
from moe_parallel.evaluation.text_loss import TextLoss
from moe_parallel.training import pretrain
from moe_parallel.training.pretrain import (
    ByteComparison,
    _width_warnings,
    compare_with_baselines,
    format_table,
)
from tests.data.small_text import small_bpe, words, write_texts

SIZES = {"num_experts": 4, "bf16": True, "hidden_size": 32, "ffn_hidden_size": 99}
AOE = {"expert_selection": "aoe", "aoe_low_rank_size": 8}
FACTORS = {"moe_gate_low_rank_size": 8}
PADS, CANNOT_READ = "each pass pads a copy of their weights", "tensor cores cannot read them"


@pytest.mark.parametrize(
    ("options", "width", "multiple", "told"),
    [
        ({"moe_ffn_hidden_size": 20}, 20, 8, f"{CANNOT_READ}, so they are several times slower"),
        (AOE | {"aoe_wide_size": 20}, 20, 8, f"{PADS}; --aoe-wide-size 16 needs none"),
        (AOE | {"aoe_wide_size": 5}, 5, 8, f"{PADS}; --aoe-wide-size 8 needs none"),
        # (3 d f - d_low d) / (d_low + 2 d) is 23.1 for f = 20, and 16.4 for f = 15.
        (FACTORS | {"moe_ffn_hidden_size": 20}, 23, 8, f"{PADS}; --moe-ffn-hidden-size 15 needs"),
        (FACTORS | {"moe_ffn_hidden_size": 4}, 2, 8, PADS),  # no smaller one fits
        (
            AOE | {"aoe_wide_size": 24, "expert_tensor_parallel_size": 2},
            24,
            16,
            f"{PADS}; --aoe-wide-size 16 needs none",
        ),
    ],
)
def test_experts_of_a_width_that_tensor_cores_cannot_read(
    options: dict[str, Any], width: int, multiple: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (warning,) = _width_warnings(make_config(SIZES | options))
    expected = f"experts are {width} wide, which is not a multiple of {multiple}: {told}"
    assert warning.startswith(expected)


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
    train_trigram = pretrain.train_trigram
    monkeypatch.setattr(
        pretrain, "train_trigram", lambda texts: trained.append(1) or train_trigram(texts)
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
