"""Loads with and without balancing: a byte model of 3 layers, 8 experts, 2 per token, on the text
of Python's language reference.

The measured values next to each threshold are the extremes over the seeds 1, 2 and 3, of which the
test runs the first, and, unless stated otherwise, over three layers. They are means of the last 50
of 250 steps. The ceiling of Ent_load and Ent_conf is ln 8 = 2.079.
"""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from moe_parallel.data.tokenizer import train_byte_bpe
from tests.data.small_text import write_texts
from tests.distributed import run_distributed
from tests.program import Options, pretrain_here

pytestmark = pytest.mark.full

SEED = 1

BYTE_MODEL: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 128,
    "num_experts": 8,
    "seq_length": 64,
    "micro_batch_size": 8,
    "global_batch_size": 8,
    "lr": 3e-3,
    "min_lr": 3e-3,
    "lr_decay_style": "constant",
    "lr_warmup_iters": 20,
    "weight_decay": 0.0,
    "log_interval": 10,
    "tensorboard": False,
}
AOE = {"expert_selection": "aoe", "aoe_low_rank_size": 24}

Layers = list[dict[str, Any]]


def train(folder: Path, systems: Mapping[str, Options]) -> dict[str, list[Layers]]:
    """Train each system for its `train_iters`, one after another on one process.

    Returns, by system, the layers of each record of ten steps.
    """
    tokenizer = train_byte_bpe([""], 257)  # bytes, and the end-of-document token
    tokenizer.save(folder / "tokenizer")
    write_texts(folder / "topics", list(topics.values()), tokenizer)
    common = BYTE_MODEL | {
        "data_path": folder / "topics",
        "split": "9,1,0",
        "tokenizer_model": folder / "tokenizer",
        "data_cache_path": folder / "cache",
        "seed": SEED,
    }
    runs = []
    for name, options in systems.items():
        steps = options["train_iters"]
        # One step longer, and stopped before it, to skip the evaluation and figure of a run's end.
        stop = {"train_iters": steps + 1, "exit_interval": steps, "save": folder / name}
        runs.append(common | options | stop)
    run_distributed(1, pretrain_here, runs, timeout=900)
    return {name: _layers(folder / name) for name in systems}


def _layers(save: Path) -> list[Layers]:
    records = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    return [record["layers"] for record in records if "lm_loss" in record]


def mean(records: list[Layers]) -> Layers:
    """The measures of each layer, averaged over records; lists are averaged entry by entry."""
    return [_mean(of_layer) for of_layer in zip(*records, strict=True)]


def last_fifth(records: list[Layers]) -> Layers:
    return mean(records[-(len(records) // 5) :])


def _mean(records: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    # A key that only some have, as output_rms, which is of a run's first step, has no mean.
    keys = [key for key in records[0] if all(key in record for record in records)]
    return {
        key: [statistics.mean(each) for each in zip(*(r[key] for r in records), strict=True)]
        if isinstance(records[0][key], list)
        else statistics.mean(r[key] for r in records)
        for key in keys
    }


NO_LOSS = {"moe_aux_loss_coeff": 0.0}
BIAS = NO_LOSS | {"moe_router_enable_expert_bias": True}

# The biases move faster than by default, because there are 250 steps and not 100,000.
SYSTEMS = {
    "topk": {},
    "topk, no loss": NO_LOSS,
    "topk, bias": BIAS | {"moe_router_bias_update_rate": 1e-2},
    "aoe": AOE,
    "aoe, no loss": AOE | NO_LOSS,
    "aoe, bias": AOE | BIAS | {"aoe_gradient": "selected", "moe_router_bias_update_rate": 0.2},
}


def loads(layers: Layers) -> list[float]:
    return [layer["ent_load"] for layer in layers]


def norm_ratios(layers: Layers) -> list[float]:
    """The ratio of the largest to the smallest mean norm of an expert, for each layer."""
    return [max(layer["norm_per_expert"]) / min(layer["norm_per_expert"]) for layer in layers]


def confidence(layers: Layers) -> float:
    """Ent_conf, the mean over layers: smaller if experts are more confident."""
    return sum(layer["ent_conf"] for layer in layers) / len(layers)


def test_balance(tmp_path):
    steps = {"train_iters": 250}
    records = train(tmp_path, {name: steps | of for name, of in SYSTEMS.items()})
    runs = {name: last_fifth(each) for name, each in records.items()}

    # The auxiliary loss balances every layer; without it, loads are uneven.
    assert min(loads(runs["topk"])) > 1.85  # 1.93
    assert min(loads(runs["aoe"])) > 1.85  # 1.97
    # Of seeds 1 to 6: 1.66, 1.38 to 1.48. Rounding decides: the reference operators have 1.49 with
    # seed 1. Single layers 0.89 to 1.87.
    assert sum(loads(runs["topk, no loss"])) / 3 < 1.75
    assert max(loads(runs["aoe, no loss"])) < 1.6  # 1.43

    # The bias balances too, without a loss.
    assert min(loads(runs["topk, bias"])) > 2.0  # 2.07
    assert min(loads(runs["aoe, bias"])) > 1.85  # 2.06; 1.94 on a processor that rounds differently

    # Without the loss, the norms of the experts diverge.
    assert max(norm_ratios(runs["aoe"])) < 2.3  # 1.81
    assert min(norm_ratios(runs["aoe, no loss"])) > 3.0  # 3.70

    # Both balanced by the loss, autonomous experts are more confident than a router.
    assert confidence(runs["aoe"]) < confidence(runs["topk"]) - 0.08  # 0.17 less
