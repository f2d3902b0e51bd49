"""The time of a step: a roofline of what was counted.

An operator takes its FLOPs / (peak x share) or its bytes / (bandwidth x share), whichever is
longer; a message its bytes / (bandwidth x share) on the slower kind of link, and at least a
latency. A layer takes at least as long as the host needs to launch its operators. Assumptions:

- operators follow one another, and each reads and writes memory as torch's does;
- dispatch and messages inside layers are not hidden; gradients and weights are, as the layout says;
- loads are balanced; data, saving and slow ranks cost nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from moe_parallel.model.flops import token_flops
from moe_parallel.plan.cluster import Cluster
from moe_parallel.plan.measure import ATTENTION, EXPERTS, FP32, LINEAR
from moe_parallel.plan.stage import (
    GRADIENT_BYTES,
    GRADIENTS,
    LOADS,
    MASTER_BYTES,
    PIPELINE,
    WEIGHTS,
    Collective,
    Model,
    messages_of_stage,
    moment_bytes,
    updated_numbers,
    weights_of_muon,
)

#: Messages outside of the layers. Layers wait for all others.
_BESIDE_LAYERS = (PIPELINE, GRADIENTS, WEIGHTS, LOADS)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what the slowest pipeline stage does, and its speed."""

    parts: dict[str, float]
    tokens: int  # of a step
    ranks: int
    model_flops: float  # of a step

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / self.ranks

    @property
    def flops_per_gpu(self) -> float:
        return self.model_flops / self.seconds / self.ranks


def step_time(
    model: Model, cluster: Cluster, vocabulary: int, mean_choices: float | None
) -> StepTime:
    """The time of a step, by the stage that is slowest in the middle of the step."""
    config, layout = model.config, model.layout
    stages = layout.unlike_stages(config.moe_layers)
    slowest = max(
        (_stage(model, cluster, stage) for stage in stages), key=lambda parts: sum(parts.values())
    )
    tokens = layout.global_batch * config.training.seq_length
    flops = tokens * token_flops(config, vocabulary, mean_choices or 0).training
    return StepTime(slowest, tokens, layout.ranks, flops)


def _stage(model: Model, cluster: Cluster, stage: int) -> dict[str, float]:
    """Seconds of a step by part, as the ranks of a stage spend them."""
    layout, passes = model.layout, model.layout.micro_batches
    graph = model.config.training.uses_cuda_graph
    parts: defaultdict[str, float] = defaultdict(float)
    forward = backward = 0.0
    for part in model.parts_of_stage(stage):
        first = _seconds_of_part(parts, part.forward, model, cluster, passes, graph)
        last = _seconds_of_part(parts, part.backward, model, cluster, passes, graph)
        forward, backward = forward + first, backward + last
    messages = messages_of_stage(model, stage)
    for purpose in dict.fromkeys(each.purpose for each in messages):
        if purpose not in _BESIDE_LAYERS:
            parts[purpose] = seconds_of_messages(messages, cluster, purpose)
    # Between micro-batches a stage computes; before the first and after the last it waits.
    parts["bubble"] = sum(parts.values()) * (layout.pp - 1) / (layout.virtual * passes)
    sends = seconds_of_messages(messages, cluster, PIPELINE)
    parts[PIPELINE] = sends if layout.virtual == 1 else 0.0  # the interleaved schedule overlaps
    hidden = backward if layout.overlap_grad_reduce else 0.0
    parts[GRADIENTS] = max(0.0, seconds_of_messages(messages, cluster, GRADIENTS) - hidden)
    hidden = forward if layout.overlap_param_gather else 0.0
    parts[WEIGHTS] = max(0.0, seconds_of_messages(messages, cluster, WEIGHTS) - hidden)
    parts[LOADS] = seconds_of_messages(messages, cluster, LOADS)
    moved = _optimizer_bytes(model, stage)
    parts["optimizer"] = moved / (cluster.node.memory_rate * cluster.efficiency.memory)
    if flops := newton_schulz_flops(model, stage):
        in_bf16 = model.config.optimizer.muon_fp32_matmul_prec == "medium"
        rate = (cluster.node.bf16 if in_bf16 else cluster.node.fp32) * cluster.efficiency.linear
        parts["optimizer"] += flops / rate
    return {name: seconds for name, seconds in parts.items() if seconds}


def _seconds_of_part(
    parts: dict[str, float],
    work: list[tuple[str, float, int]],
    model: Model,
    cluster: Cluster,
    passes: int,
    graph: bool,
) -> float:
    """Adds the seconds of all micro-batches by kind. Returns those of one."""
    node, efficiency = cluster.node, cluster.efficiency
    config = model.config
    peak = node.bf16 if config.training.bf16 else node.fp32
    shares = {
        LINEAR: efficiency.linear,
        FP32: efficiency.linear,
        EXPERTS: efficiency.experts,
        ATTENTION: efficiency.attention,
    }
    memory, seconds = node.memory_rate * efficiency.memory, 0.0
    for kind, flops, nbytes in work:
        rate = (node.fp32 if kind == FP32 else peak) * shares.get(kind, 1.0)
        if kind == EXPERTS and config.fp8.fp8_format is not None and node.fp8 is not None:
            # Grouped products in FP8 are as much below dense ones as those in bf16.
            rate = node.fp8 * efficiency.fp8 * efficiency.experts / efficiency.linear
        its = max(flops / rate, nbytes / memory) + node.kernel_time
        parts[kind] += passes * its
        seconds += its
    waiting = 0.0 if graph else max(0.0, len(work) * node.call_time - seconds)
    parts["host"] += passes * waiting
    return seconds + waiting


def _optimizer_bytes(model: Model, stage: int) -> int:
    """What the optimizer reads and writes: gradients, moments, masters, weights."""
    of_weight = GRADIENT_BYTES + 2 * MASTER_BYTES + model.value
    return updated_numbers(model, stage) * of_weight + 2 * moment_bytes(model, stage)


def newton_schulz_flops(model: Model, stage: int) -> int:
    """FLOPs of Muon on a rank: X X^T, its square, and a product with X, in each iteration."""
    total = 0
    for weight in weights_of_muon(model, stage):
        count, *sides = weight.matrices
        m, n = sorted(sides)
        total += count * (4 * m * m * n + 2 * m**3)
    return model.config.optimizer.muon_num_ns_steps * total


def seconds_of_messages(messages: Iterable[Collective], cluster: Cluster, purpose: str) -> float:
    """Seconds of all messages for one purpose; the two kinds of link work at the same time."""
    node, efficiency = cluster.node, cluster.efficiency
    total = 0.0
    for each in messages:
        if each.purpose != purpose:
            continue
        wire = each.wire(node.gpus)
        latency = node.network_latency if wire.network else node.link_latency
        total += each.times * max(
            latency,
            wire.node / (node.link_rate * efficiency.node),
            wire.network / (node.network_rate * efficiency.network),
        )
    return total
