"""The time of a step: computation, messages, the host, the bubble, and what overlaps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moe_parallel.plan.cluster import Cluster
from moe_parallel.plan.layout import Layout
from moe_parallel.plan.memory import numbers_of_stage
from moe_parallel.plan.messages import (
    CONTEXT,
    COUPLING,
    DISPATCH,
    GRADIENTS,
    LOADS,
    PIPELINE,
    TENSOR,
    W_DOWN,
    WEIGHTS,
    Collective,
    Wire,
    messages_of_layer,
    messages_of_stage,
)
from moe_parallel.plan.products import DEPTH, Product, serial_share
from moe_parallel.plan.shape import Shape
from moe_parallel.plan.software import Software, exposed_dispatch
from moe_parallel.plan.weights import HEAD
from moe_parallel.plan.work import (
    CORE_ATTENTION,
    EXPERT_PRODUCTS,
    FP32,
    LINEAR,
    Work,
    is_repeated,
    model_flops_per_token,
    optimizer_bytes,
    work_of_further_layers,
    work_of_head,
    work_of_layer,
)

THIS = Software()  # this program
#: Messages that a layer waits for. The others overlap where the layout says so.
_IN_LAYERS = (TENSOR, CONTEXT, DISPATCH, W_DOWN, COUPLING)


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
    shape: Shape, layout: Layout, cluster: Cluster, software: Software = THIS
) -> StepTime:
    """The time of a step, by the stage that is slowest in the middle of the step."""
    stages = layout.unlike_stages(shape.moe_layers)
    slowest = max(
        (_stage(shape, layout, cluster, stage, software) for stage in stages),
        key=lambda parts: sum(parts.values()),
    )
    tokens = layout.global_batch * shape.seq_length
    return StepTime(slowest, tokens, layout.ranks, tokens * model_flops_per_token(shape))


def _stage(
    shape: Shape, layout: Layout, cluster: Cluster, stage: int, software: Software
) -> dict[str, float]:
    """Seconds of a step by part, as the ranks of a stage spend them."""
    passes, gpus = layout.micro_batches, cluster.node.gpus
    parts: defaultdict[str, float] = defaultdict(float)
    first_forward = last_backward = 0.0
    for work in work_of_stage(shape, layout, stage, software):
        forward, backward = seconds_of(work, shape, cluster)
        repeated = forward if is_repeated(work, layout) else 0.0
        parts[work.part] += passes * (forward + backward)
        parts["recompute"] += passes * repeated
        first_forward += forward
        last_backward += backward + repeated
    parts["kernels"] = passes * _seconds_of_kernels(shape, layout, cluster, stage, software)
    messages = messages_of_stage(shape, layout, stage)
    in_layers = sum(seconds for part, seconds in parts.items() if part != HEAD)
    for purpose in _IN_LAYERS:
        parts[purpose] += seconds_of_messages(
            messages, cluster, purpose, lambda each: software.wire(each, shape, layout, gpus)
        )
    hides = software.hides_dispatch
    exposed = exposed_dispatch(parts[DISPATCH], in_layers, layout, hides)
    shown = exposed / parts[DISPATCH] if parts[DISPATCH] else 1.0
    parts[DISPATCH] = exposed
    parts["host"] = _seconds_of_waiting(shape, layout, cluster, stage, software, shown)
    # Between micro-batches a stage computes; before the first and after the last it waits.
    busy = sum(parts.values())
    parts["bubble"] = busy * (layout.pp - 1) / (layout.virtual * passes)
    sends = seconds_of_messages(messages, cluster, PIPELINE)
    parts[PIPELINE] = sends if layout.virtual == 1 else 0.0  # the interleaved schedule overlaps
    gradients = seconds_of_messages(messages, cluster, GRADIENTS)
    hidden = last_backward if layout.overlap_grad_reduce else 0.0
    parts[GRADIENTS] = max(0.0, gradients - hidden)
    parts[LOADS] = seconds_of_messages(messages, cluster, LOADS)
    gathers = seconds_of_messages(messages, cluster, WEIGHTS)
    hidden = first_forward if layout.overlap_param_gather else 0.0
    parts[WEIGHTS] = max(0.0, gathers - hidden)
    _, numbers, states = numbers_of_stage(shape, layout, stage)
    moved = optimizer_bytes(numbers, states, shape)
    parts["optimizer"] = moved / (cluster.node.memory_rate * cluster.efficiency.memory)
    return {name: seconds for name, seconds in parts.items() if seconds}


def _seconds_of_kernels(
    shape: Shape, layout: Layout, cluster: Cluster, stage: int, software: Software
) -> float:
    """What the kernels of a stage take for a micro-batch besides their FLOPs or traffic."""
    kernels = sum(
        count * software.kernels_of_layer(shape, layout, is_moe)
        for is_moe, count in _layers(shape, layout, stage).items()
    )
    return kernels * cluster.node.kernel_time


def _seconds_of_waiting(
    shape: Shape, layout: Layout, cluster: Cluster, stage: int, software: Software, shown: float
) -> float:
    """Seconds of a step in which a stage waits for the host to launch the kernels of its layers.

    `shown`: the share of the dispatch that does not run during products.
    """
    total, gpus = 0.0, cluster.node.gpus
    for is_moe, count in _layers(shape, layout, stage).items():
        kernels = software.kernels_of_layer(shape, layout, is_moe)
        seconds = kernels * cluster.node.kernel_time
        extra = software.work_of_layer(shape, layout, is_moe)
        for work in [*work_of_layer(shape, layout, is_moe), *extra]:
            forward, backward = seconds_of(work, shape, cluster)
            seconds += forward * (2 if is_repeated(work, layout) else 1) + backward
        seconds *= layout.micro_batches
        messages = [m for m in messages_of_layer(shape, layout, is_moe) if m.group.size > 1]
        for purpose in _IN_LAYERS:
            share = shown if purpose == DISPATCH else 1.0
            seconds += share * seconds_of_messages(
                messages, cluster, purpose, lambda each: software.wire(each, shape, layout, gpus)
            )
        calls = software.calls_of_layer(shape, layout, is_moe) * layout.micro_batches
        total += count * max(0.0, calls * cluster.node.call_time - seconds)
    return total


def _layers(shape: Shape, layout: Layout, stage: int) -> Counter[bool]:
    """The numbers of dense (False) and of MoE layers (True) of a stage."""
    chunks = (
        layout.kinds_of_layer(shape.moe_layers, stage, chunk) for chunk in range(layout.virtual)
    )
    kinds = sum(chunks, Counter())
    if shape.further and layout.ends(stage, layout.virtual - 1):
        kinds[shape.moe_layers[-1]] += shape.further
    return kinds


def work_of_stage(
    shape: Shape, layout: Layout, stage: int, software: Software = THIS
) -> list[Work]:
    """The operations of a stage on one micro-batch; equal layers are one entry each."""
    found: list[Work] = []
    if layout.ends(stage, layout.virtual - 1):
        heads = 1 + shape.further
        found += [work.times(heads) for work in work_of_head(shape, layout)]
        found += work_of_further_layers(shape, layout)
    for is_moe, count in _layers(shape, layout, stage).items():
        of_layer = work_of_layer(shape, layout, is_moe)
        of_layer += software.work_of_layer(shape, layout, is_moe)
        found += [work.times(count) for work in of_layer]
    return found


def seconds_of(work: Work, shape: Shape, cluster: Cluster) -> tuple[float, float]:
    """Seconds forward and backward: of the FLOPs, or of the memory traffic if that takes longer."""
    node, efficiency = cluster.node, cluster.efficiency
    peak = node.bf16 if shape.bf16 and work.kernel != FP32 else node.fp32
    share = {
        LINEAR: efficiency.linear,
        FP32: efficiency.linear,
        EXPERT_PRODUCTS: efficiency.experts,
        CORE_ATTENTION: efficiency.attention,
    }.get(work.kernel, 1.0)
    depth: float = DEPTH
    if work.fp8 and node.fp8 is not None:
        # Grouped products in FP8 are as much below dense ones as those in bf16.
        share *= efficiency.fp8 / efficiency.linear
        peak, depth = node.fp8, DEPTH * node.fp8 / node.bf16
    rate, memory = peak * share, node.memory_rate * efficiency.memory

    def seconds(flops: float, nbytes: float, products: tuple[Product, ...]) -> float:
        return max(flops / rate / serial_share(products, node.processors, depth), nbytes / memory)

    return (
        seconds(work.flops, work.nbytes, work.products),
        seconds(work.backward_flops, work.backward_bytes, work.backward_products),
    )


def seconds_of_messages(
    messages: Iterable[Collective],
    cluster: Cluster,
    purpose: str,
    wire_of: Callable[[Collective], Wire] | None = None,
) -> float:
    """Seconds of all messages for one purpose; the two kinds of link work at the same time.

    `wire_of`: the bytes that a rank sends in an operation; None: those of this program.
    """
    node, efficiency = cluster.node, cluster.efficiency
    total = 0.0
    for each in messages:
        if each.purpose != purpose:
            continue
        wire = each.wire(node.gpus) if wire_of is None else wire_of(each)
        latency = node.network_latency if wire.network else node.link_latency
        total += each.times * max(
            latency,
            wire.node / (node.link_rate * efficiency.node),
            wire.network / (node.network_rate * efficiency.network),
        )
    return total
