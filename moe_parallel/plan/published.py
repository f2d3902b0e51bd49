"""Published training runs, planned like any other, to learn how far off the plan is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_parallel.config.selection import SharedExpertSize
from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import Cluster, Efficiency, parse_cluster
from moe_parallel.plan.experts import LayerWeight, PlannedExperts
from moe_parallel.plan.host import MEGATRON
from moe_parallel.plan.layout import Layout
from moe_parallel.plan.shape import Latent, Shape, swiglu_weights
from moe_parallel.plan.software import Software
from moe_parallel.plan.step_time import StepTime, step_time
from moe_parallel.reading import parse_json, read_small


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of a node: `Node` has their meaning."""

    call_time: float
    kernel_time: float


@dataclass(frozen=True)
class PublishedRun:
    """A run whose speed is published."""

    name: str
    shape: Shape
    layout: Layout
    software: Software
    cluster: Cluster
    tokens_per_gpu: float  # per second
    source: str
    differs: str  # in what the plan does not describe it
    calibrates: str | None = None  # the constant that is fitted to it, by `calibration`

    def planned(self, efficiency: Efficiency, times: KernelTimes | None = None) -> StepTime:
        node = self.cluster.node
        if times is not None:
            node = replace(node, call_time=times.call_time, kernel_time=times.kernel_time)
        cluster = Cluster(node, self.cluster.nodes, efficiency)
        return step_time(self.shape, self.layout, cluster, self.software)


def read_published(path: Path) -> list[PublishedRun]:
    """The runs of a JSON file such as docs/results/planner/published_runs.json.

    Raises InputError if it cannot be read.
    """
    try:
        return [_run(entry) for entry in parse_json(read_small(path))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--published {path} cannot be read: {error!r}") from None


def _run(entry: dict[str, Any]) -> PublishedRun:
    cluster = parse_cluster(entry["nodes"], "--published: nodes")
    shape = _shape(entry["model"], entry["seq_length"], entry["fp8"])
    sizes = {
        "etp": entry["layout"].get("tp", 1),
        "sequence_parallel": entry["layout"].get("tp", 1) > 1,
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    } | {name: _hashable(value) for name, value in entry["layout"].items()}
    layout = Layout(ranks=cluster.ranks, **sizes)
    software = Software(**entry.get("software", {}), host_calls=MEGATRON)
    figure = entry["figure"]
    speed = figure.get("tokens_per_second_and_gpu")
    if speed is None:
        speed = figure["megatron_tflops_per_gpu"] * 1e12 / _megatron_flops_per_token(shape)
    texts = entry["source"], entry["differs"], entry.get("calibrates")
    return PublishedRun(entry["name"], shape, layout, software, cluster, speed, *texts)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _shape(model: dict[str, Any], seq_length: int, fp8: bool) -> Shape:
    d, n = model["hidden"], model.get("experts")
    experts = None
    if n is not None:
        f, width = model["width"], model.get("shared_width")
        shared = None if width is None else SharedExpertSize(width)
        weights = (*swiglu_weights(d, n, f), *_shared_weights(d, width))
        experts = PlannedExperts(n, model["per_token"], f, weights, shared=shared)
    dense_layers = model["layers"] if n is None else model.get("dense_layers", 0)
    moe_layers = (False,) * dense_layers + (True,) * (model["layers"] - dense_layers)
    latent = Latent(**model["latent"]) if "latent" in model else None
    return Shape(
        moe_layers=moe_layers,
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
        latent=latent,
        further=model.get("further", 0),
        seen=_seen(seq_length, model.get("window")),
    )


def _shared_weights(d: int, width: int | None) -> tuple[LayerWeight, ...]:
    if width is None:
        return ()
    return (
        LayerWeight("shared_fc1", 2 * width * d, "tp"),
        LayerWeight("shared_fc2", width * d, "tp"),
    )


def _seen(seq_length: int, window: int | None) -> float:
    """The share of causal scores if every second layer sees `window` tokens before each only."""
    if window is None:
        return 1.0
    in_window = window - window**2 / (2 * seq_length)  # mean of a token; less at the beginning
    return (1 + in_window / (seq_length / 2)) / 2


def _megatron_flops_per_token(shape: Shape) -> float:
    """By which Megatron-LM reports TFLOP/s: all S x S scores count, also those that are masked."""
    d, experts = shape.hidden, shape.experts
    assert experts is not None
    attention = (
        d * shape.qkv_width + shape.query_width * d + 2 * shape.seq_length * shape.query_width
    )
    layer = attention + 3 * experts.per_token * d * experts.width
    return 6.0 * (len(shape.moe_layers) * layer + d * shape.vocabulary)
