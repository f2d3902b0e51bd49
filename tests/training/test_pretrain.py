"""What a run warns of before it trains, and the comparison at its end."""

import lzma
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_parallel.config import make_config
from moe_parallel.data.datasets import Source, build_datasets
from moe_parallel.evaluation.text_loss import TextLoss
from moe_parallel.training.pretrain import _width_warnings, bits_per_byte
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


TEXTS = {"a": [words(30, 90), words(9, 91)], "b": ["of another kind " + words(30, 92)]}
MEASURED = {"a": TextLoss(700.0, 100, 300), "b": TextLoss(900.0, 90, 200)}


@pytest.mark.parametrize("domains", ["b", "ab"])
def test_bits_per_byte_of_the_model_and_of_xz(tmp_path: Path, domains: str) -> None:
    bpe = small_bpe()
    sources = [
        Source(
            name,
            None,
            write_texts(tmp_path / f"{name}_train", [words(30, i) for i in range(9)], bpe),
            write_texts(tmp_path / f"{name}_valid", TEXTS[name], bpe),
            None,
        )
        for name in domains
    ]
    datasets = build_datasets(
        sources,
        tokenizer=bpe,
        seq_length=16,
        train_samples=10,
        seed=1,
        cache_folder=tmp_path / "cache",
    )
    head, *rows = bits_per_byte({name: MEASURED[name] for name in domains}, datasets, bpe)
    assert head.split() == "bits per byte model xz -9".split()
    names = [*domains, "all"] if len(domains) > 1 else [*domains]
    expected = {name: (MEASURED[name].bits_per_byte, "".join(TEXTS[name])) for name in domains}
    expected["all"] = (TextLoss(1600.0, 190, 500).bits_per_byte, "".join(TEXTS["a"] + TEXTS["b"]))
    for name, row in zip(names, rows, strict=True):
        ours, text = expected[name]
        xz = 8 * len(lzma.compress(text.encode(), preset=9)) / len(text.encode())
        assert row.split() == [name, f"{ours:.3f}", f"{xz:.3f}"]
