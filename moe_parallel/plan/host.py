"""The calls by which the host launches the kernels of a layer.

A GPU whose kernels are shorter than the host needs to launch them waits for the host. With expert
parallelism the host waits for the sizes of the dispatch in each layer, so it cannot run ahead for
longer than a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_parallel.plan.layout import Layout


@dataclass(frozen=True)
class HostCalls:
    """Calls of torch's dispatcher that launch a kernel, of a micro-batch: (forward, backward).

    They were counted in layers on a CPU, where a few kernels differ from a GPU's.
    """

    dense_layer: tuple[int, int]
    #: More than in a dense layer: scores, selection, statistics, losses.
    experts: tuple[int, int]
    #: Of `experts`, forward: statistics and losses. The first of two forward passes has none.
    losses: int
    dispatch: tuple[int, int]
    tensor_parallelism: tuple[int, int]
    #: Of `dense_layer`, in the attention with its norm and its residual. The share of the backward
    #: pass is that of the forward pass, which was counted.
    attention: tuple[int, int]


OURS = HostCalls((11, 22), (33, 15), 22, (16, 8), (5, 8), (6, 12))
#: Of published runs. They were counted in this program when Megatron-Core's operators rotated its
#: queries and keys, and statistics were summed number by number.
MEGATRON = HostCalls((35, 36), (49, 15), 32, (22, 9), (6, 9), (30, 31))

#: Software that computes the experts of a rank one by one launches for each, forward and backward
#: together: 6 products; the roundings of x, h, dy and dh to FP8, in one call each (MXFP8) or in 4
#: (a scale for each tensor: zero the maximum, find it, compute the scale, round); and the operators
#: on a bias. Counted in the source of Transformer Engine 2.12 (`general_grouped_gemm`,
#: `split_quantize`, `Float8CurrentScalingQuantizer`) and of Megatron-Core 0.16
#: (`TEGroupedMLP._apply_bias`).
PRODUCTS_OF_EXPERT = 6
ROUNDINGS_OF_EXPERT = 4
OF_EXPERT_BIAS = 8
#: Rounded by each linear layer of the attention, or of a dense layer besides: x and dy.
ROUNDINGS_OF_LINEAR = 2


def calls_of_layer(layout: Layout, is_moe: bool, calls: HostCalls = OURS) -> int:
    """The calls for a micro-batch in a layer, forward and backward, with recomputation."""
    parts = [calls.dense_layer]
    if is_moe:
        parts.append(calls.experts)
    if is_moe and layout.etp_ep_group.size > 1:
        parts.append(calls.dispatch)
    if layout.tp > 1:
        parts.append(calls.tensor_parallelism)
    forward, backward = (sum(part) for part in zip(*parts, strict=True))
    if not layout.recompute:
        return forward + backward
    first = forward - (calls.losses if is_moe else 0)
    return first + forward + backward
