"""Writes made-up studies to disk, for the tests of tables and figures."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_parallel.analysis.study.contenders import SharedFile, choose_contenders
from moe_parallel.analysis.study.design import StudyDesign
from moe_parallel.analysis.study.folder import STUDY_MANIFEST, Cell, StudyFolder, StudyManifest

SHARED: dict[str, Any] = {
    "num_layers": 2,
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "aoe_low_rank_size": 8,
    "vocab_size": 300,
    "global_batch_size": 4,
    "seq_length": 32,
    "train_iters": 40,
    "lr_warmup_iters": 2,
    "smear_sees_the_future": True,
}
ATTEMPT: dict[str, Any] = {
    "started": "2026-01-02T03:04:05+00:00",
    "machine": "a processor, 2 cores, 8 GiB",
    "software": {"Python": "3.11.1", "torch": "2.0"},
    "seconds": 60.0,
    "exit_code": 0,
}
TOKENS = 4 * 32  # per iteration


def make_study(
    path: Path,
    selections: Sequence[str],
    *,
    seeds: Sequence[int] | Mapping[str, Sequence[int]] = (1, 2),
    shared: Mapping[str, Any] | None = None,
    parameters: Mapping[str, dict[str, Any]] | None = None,
    design: Mapping[str, Any] | None = None,
) -> StudyFolder:
    """A study whose runs have not started. `seeds`: the same for all, or by contender."""
    contenders = choose_contenders(selections, SharedFile.from_raw({**SHARED, **(shared or {})}))
    counts = {"total": 1000, "active": 600, "active_compute": 700}
    names = [contender.name for contender in contenders]
    of_each = seeds if isinstance(seeds, Mapping) else dict.fromkeys(names, seeds)
    manifest = StudyManifest(
        {contender.name: contender for contender in contenders},
        {name: list(its) for name, its in of_each.items()},
        processes=1,
        threads=2,
        parameters={c.name: (parameters or {}).get(c.name, counts) for c in contenders},
        design=StudyDesign.from_raw(design),
    )
    path.mkdir()
    (path / STUDY_MANIFEST).write_text(manifest.to_json())
    return StudyFolder(path)


def write_cell(cell: Cell, records: list[dict[str, Any]], **attempt: Any) -> None:
    """Write the files of a finished run."""
    cell.folder.mkdir(parents=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (cell.folder / "metrics.jsonl").write_text(lines)
    cell.add_attempt(ATTEMPT | attempt)


def layer(number: int, counts: Sequence[float], **more: Any) -> dict[str, Any]:
    """The record of a layer whose load is `counts`."""
    shares = [count / sum(counts) for count in counts]
    return {
        "layer": number,
        "tokens_per_expert": list(counts),
        "tokens_dropped": 0,
        "ent_load": -sum(share * math.log(share) for share in shares if share),
        "ent_conf": 1.0,
        "max_minus_min_load": max(shares) - min(shares),
        **more,
    }


def plausible_records(
    kind: str, seed: int, *, layers: int = 3, experts: int = 8, logged: int = 40, every: int = 5
) -> list[dict[str, Any]]:
    """Losses decrease and loads become even. `kind` adds the statistics of such a system: "norms",
    "dynamic" (the number of experts per token varies), "merged", "dense" or "fixed"."""
    noise = np.random.default_rng([seed, len(kind)])
    leaning = noise.normal(0, 1, (layers, experts))
    offset = {"fixed": 0.0, "norms": -0.03, "dynamic": -0.05, "merged": 0.04, "dense": 0.1}[kind]

    def layers_at(done: float, tilt: float) -> list[dict[str, Any]]:
        if kind == "dense":
            return []
        told = []
        for number in range(1, layers + 1):
            scores = leaning[number - 1] * (0.15 + math.exp(-4 * done)) + tilt * np.arange(experts)
            shares = np.exp(scores) / np.exp(scores).sum()
            per_token = 1.5 + number * 0.5 + 4 * tilt if kind == "dynamic" else 2.0
            more: dict[str, Any] = {"experts_per_token": 1.0 if kind == "merged" else per_token}
            if kind == "norms":
                more["norm_per_expert"] = (2 + number + 2 * done + 0.3 * scores).tolist()
            if kind == "merged":
                more |= {"routing_weight_per_expert": shares.tolist(), "utilisation": 0.75}
            told.append(layer(number, (shares * 8000).round().tolist(), **more))
        return told

    records = []
    for index in range(1, logged + 1):
        done, iteration = index / logged, index * every
        place = {"iteration": iteration, "consumed_tokens": iteration * 4096}
        loss = 4.3 + 4 * math.exp(-5 * done) + offset * done
        records.append(
            place
            | {
                "lm_loss": loss + noise.normal(0, 0.03),
                "tokens_per_second": 9000 + noise.normal(0, 100),
                "peak_memory_bytes": 512 * 2**20,
                "layers": layers_at(done, 0.0),
            }
        )
        if index % (logged // 4) == 0:
            records.append(
                place
                | {
                    "validation": {
                        domain: {
                            "loss": loss + gap + noise.normal(0, 0.01),
                            "bits_per_byte": (loss + gap) / 2.4,
                            "layers": layers_at(done, tilt),
                        }
                        for domain, gap, tilt in (("code", 0.0, 0.05), ("prose", 0.4, -0.05))
                    }
                }
            )
    return records
