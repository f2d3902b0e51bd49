"""Short training runs of a byte model on the text of Python's language reference."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from moe_parallel.data.tokenizer import train_byte_bpe
from tests.data.small_text import write_texts
from tests.distributed import run_distributed
from tests.program import Options, pretrain_here

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
