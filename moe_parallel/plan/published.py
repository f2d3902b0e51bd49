"""Published training runs, planned like any other, to learn how far off the plan is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import Cluster, Efficiency, parse_cluster
from moe_parallel.plan.experts import PlannedExperts
from moe_parallel.plan.layout import Layout
from moe_parallel.plan.shape import Shape, swiglu_weights
from moe_parallel.plan.step_time import StepTime, step_time


@dataclass(frozen=True)
class PublishedRun:
    """A run whose speed is published."""

    name: str
    shape: Shape
    layout: Layout
    cluster: Cluster
    tokens_per_gpu: float  # per second
    source: str
    differs: str  # in what the plan does not describe it

    def planned(self, efficiency: Efficiency) -> StepTime:
        cluster = Cluster(self.cluster.node, self.cluster.nodes, efficiency)
        return step_time(self.shape, self.layout, cluster)


def read_published(path: Path) -> list[PublishedRun]:
    """The runs of a JSON file such as docs/results/planner/published_runs.json.

    Raises InputError if it cannot be read.
    """
    try:
        return [_run(entry) for entry in json.loads(path.read_text())]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--published {path} cannot be read: {error!r}") from None


def _run(entry: dict[str, Any]) -> PublishedRun:
    cluster = parse_cluster(entry["nodes"], "--published: nodes")
    shape = _shape(entry["model"], entry["seq_length"], entry["fp8"])
    sizes = {"etp": entry["layout"].get("tp", 1)} | entry["layout"]
    layout = Layout(
        ranks=cluster.ranks,
        sequence_parallel=sizes.get("tp", 1) > 1,
        distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        **sizes,
    )
    figure = entry["figure"]
    speed = figure.get("tokens_per_second_and_gpu")
    if speed is None:
        speed = figure["megatron_tflops_per_gpu"] * 1e12 / _megatron_flops_per_token(shape)
    return PublishedRun(
        entry["name"], shape, layout, cluster, speed, entry["source"], entry["differs"]
    )


def _shape(model: dict[str, Any], seq_length: int, fp8: bool) -> Shape:
    d, n = model["hidden"], model.get("experts")
    experts = None
    if n is not None:
        f = model["width"]
        experts = PlannedExperts(n, model["per_token"], f, swiglu_weights(d, n, f))
    return Shape(
        moe_layers=(n is not None,) * model["layers"],
        hidden=d,
        heads=model["heads"],
        groups=model["groups"],
        head_width=model["head_width"],
        dense_width=model.get("dense_width", 0),
        vocabulary=model["vocabulary"],
        tied=False,
        seq_length=seq_length,
        bf16=True,
        experts=experts,
        loss_chunk=seq_length,
        fp8_linear=fp8,
        fp8_experts=fp8,
    )


def _megatron_flops_per_token(shape: Shape) -> float:
    """By which Megatron-LM reports TFLOP/s: all S x S scores count, also those that are masked."""
    d, experts = shape.hidden, shape.experts
    assert experts is not None
    attention = (
        d * shape.qkv_width + shape.query_width * d + 2 * shape.seq_length * shape.query_width
    )
    layer = attention + 3 * experts.per_token * d * experts.width
    return 6.0 * (len(shape.moe_layers) * layer + d * shape.vocabulary)
