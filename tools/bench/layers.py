"""Complete MoE layers, forward and backward: routed, and autonomous (AoE)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moe_parallel.ops import Ops
from tools.bench import operators
from tools.bench.inputs import Draw, RoutedLayerWork, leaf
from tools.bench.measurement import BOTH, OURS, Absent, Bench, BenchContender, Measure, Products
from tools.bench.peers import huggingface, megatron, torch_ops
from tools.bench.sizes import BenchSize

UNFUSED = "ours, op by op"
TWIN = "our routed layer"
# Variants of AoE: the gradient (full or selected), and for the full one, whether C of the experts
# that were not chosen is kept for the backward pass or recomputed there. Unless its name says so,
# G = C W_up is recomputed, as is the default.
FULL_KEPT, FULL_RECOMPUTED = "ours, full, kept", "ours, full, recomputed"
FULL_KEPT_WITH_G = "ours, full, kept with G"
SELECTED, SELECTED_WITH_G = "ours, selected", "ours, selected, G kept"
# Numbers. With the 226 million of the size `erc`, the record of memory filled a host of 24 GiB.
MOST_WEIGHTS_OF_COMPOSITION = 100_000_000


def routed_layer(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    layer = RoutedLayerWork.drawn(size, draw)
    products = Products(((size.rows, size.d, 2 * size.f), (size.rows, size.f, size.d)))
    return Bench(
        "routed_layer",
        size,
        draw.dtype,
        [
            layer.contender(OURS, lambda: [_routed(layer, ours)]),
            layer.contender(UNFUSED, lambda: [_op_by_op(layer, ours)]),
        ],
        [
            *torch_ops.routed_layer_peers(layer),
            *huggingface.routed_layer_peers(layer),
            *megatron.routed_layer_peers(layer),
        ],
        (Measure(BOTH, products.with_gradients()),),
    )


def _routed(layer: RoutedLayerWork, ours: Ops) -> Tensor:
    row_map = ours.routing_map(layer.experts_TK, layer.size.n, num_rows=layer.experts_TK.numel())
    return ours.routed_experts(
        layer.x_TD, layer.probs_TK, row_map, layer.w_gate_up_ED2F, layer.w_out_EFD
    )


def _op_by_op(layer: RoutedLayerWork, ours: Ops) -> Tensor:
    """The same layer of single operators. The difference is the gain of fusing them."""
    row_map = ours.routing_map(layer.experts_TK, layer.size.n, num_rows=layer.experts_TK.numel())
    x_ND = ours.permute(layer.x_TD, row_map)
    gate_up_N2F = ours.grouped_gemm(x_ND, layer.w_gate_up_ED2F, row_map.counts_E)
    probs_N = layer.probs_TK.flatten()[row_map.slots_N]
    h_NF = ours.swiglu(*gate_up_N2F.chunk(2, dim=1), probs_N)
    y_ND = ours.grouped_gemm(h_NF, layer.w_out_EFD, row_map.counts_E)
    return ours.unpermute(y_ND, row_map)


def aoe_layer(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    """The bench of the AoE layer, including the selection. The yardstick is our routed layer of as
    many parameters, with the same tokens and the choices of the norms."""
    weights = {
        "w_down": leaf(draw.weight(size.n, size.d, size.l, seed=2)),
        "w_up": leaf(draw.weight(size.n, size.l, size.wide, seed=3)),
        "w_p": leaf(draw.weight(size.n, size.d, size.wide, seed=4)),
        "w_out": leaf(draw.weight(size.n, size.wide, size.d, seed=5)),
    }
    x_TD = leaf(draw.tokens_with_margin(size, weights["w_down"].detach()))
    dy_TD = draw.normal(size.T, size.d, seed=6)

    contender = partial(
        BenchContender,
        leaves={"x": x_TD} | weights,
        weights=frozenset(weights),
        upstream=(dy_TD,),
        unordered=frozenset({"output 1"}),
    )

    def autonomous(name: str, **how: bool) -> BenchContender:
        return contender(name, partial(_autonomous, x_TD, weights, size.K, ours, **how))

    composition = Absent(
        "torch composition", "at this size the record of its memory takes more than 20 GiB"
    )
    if sum(weight.numel() for weight in weights.values()) <= MOST_WEIGHTS_OF_COMPOSITION:
        composition = contender(
            composition.name, lambda: torch_ops.autonomous_layer(x_TD, *weights.values(), size.K)
        )
    products = Products((
        (size.T, size.d, size.n * size.l),
        (size.rows, size.l, size.wide),
        (size.rows, size.d, size.wide),
        (size.rows, size.wide, size.d),
    ))  # fmt: skip
    return Bench(
        "aoe_layer",
        size,
        draw.dtype,
        [
            autonomous(FULL_KEPT, kept=True),
            autonomous(FULL_KEPT_WITH_G, kept=True, keeps_g=True),
            autonomous(FULL_RECOMPUTED),
            autonomous(SELECTED, selected=True),
            autonomous(SELECTED_WITH_G, selected=True, keeps_g=True),
            _twin(size, draw, ours, x_TD, weights["w_down"], dy_TD),
        ],
        [composition],
        (Measure(BOTH, products.with_gradients()),),
    )


def _autonomous(
    x_TD: Tensor,
    weights: dict[str, Tensor],
    k: int,
    ours: Ops,
    *,
    selected: bool = False,
    kept: bool = False,
    keeps_g: bool = False,
) -> tuple[Tensor, Tensor]:
    """y_TD and experts_TK."""
    w_down = weights["w_down"]
    with torch.set_grad_enabled(torch.is_grad_enabled() and not selected):
        keep, gradient = "all" if kept else "chosen", "chosen" if selected else "all"
        scores = ours.norm_topk(x_TD, w_down, k, keep=keep, gradient=gradient)
        norms_TK = scores.norms_TE.gather(1, scores.experts_TK)
        probs_TK = norms_TK.softmax(-1)
    experts_TK = scores.experts_TK
    row_map = ours.routing_map(experts_TK, w_down.size(0), num_rows=experts_TK.numel())
    y_TD = ours.autonomous_experts(
        x_TD,
        probs_TK,
        row_map,
        *weights.values(),
        c_TKR=scores.c_TKR,
        norms_TK=norms_TK if selected else None,
        recompute_gate=not keeps_g,
    )
    return y_TD, experts_TK


def _twin(
    size: BenchSize, draw: Draw, ours: Ops, x_TD: Tensor, w_down_EDR: Tensor, dy_TD: Tensor
) -> BenchContender:
    with torch.no_grad():
        experts_TK = ours.norm_topk(x_TD, w_down_EDR, size.K)[1]
    drawn = RoutedLayerWork.drawn(size, draw)
    layer = replace(drawn, x_TD=x_TD, experts_TK=experts_TK, dy_TD=dy_TD)
    return replace(layer.contender(TWIN, lambda: [_routed(layer, ours)]), answer="routed")


BENCHES: dict[str, Callable[[BenchSize, Draw, Ops], Bench]] = {
    bench.__name__: bench
    for bench in (
        operators.routing_map, operators.permute, operators.unpermute, operators.grouped_gemm,
        operators.swiglu, operators.norm_topk, operators.expert_merge, operators.attention,
        routed_layer, aoe_layer,
    )
}  # fmt: skip
