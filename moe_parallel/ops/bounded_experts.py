"""The experts' operators with bounded activations: beyond a budget they compute in parts.

Without a capacity nothing limits the rows that the experts of one rank receive, and what an expert
keeps and computes grows with them. Beyond the budget the tokens are cut into parts. A part keeps
nothing but its inputs; its backward pass computes the part's forward pass again. At any moment the
activations of one part exist, and they fit into the budget:

    rows of a part  = budget / (bytes of the activations of a row)
    SwiGLU experts    6 F values per row: W_g x, W_p x, SwiGLU's output, and the three gradients
    AoE's experts     6 W + 3 R values per row: the same with W = d_wide, and C, its copy, gradient
    in addition       the rows themselves: inputs, outputs and their gradients, D values per row

The counts are those of the native operators with all rows at one expert, which is the most. A
token's output is the same sum as without a budget, in the same order. Gradients of weights are sums
over the parts, so they are equal within the rounding of the weights' dtype, or of the main
gradients, if those are given.

Shape suffixes: T tokens, K choices of each, E experts, D model width, F or W inner width, R
low-rank size, N rows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_parallel.ops import Ops
from moe_parallel.ops.types import RowMap

#: (x_TD, probs_TK, row map, other tensors of the tokens) -> y_TD.
Compute = Callable[..., Tensor]


def within_budget(ops: Ops, budget: int | None) -> Ops:
    """`ops` with a budget, in bytes, for the activations of each call of the experts' operators.

    None: `ops` unchanged.
    """
    if budget is None:
        return ops
    bounded = BoundedExperts(ops, budget)
    return replace(
        ops,
        routed_experts=bounded.routed_experts,
        autonomous_experts=bounded.autonomous_experts,
    )


@dataclass(frozen=True)
class BoundedExperts:
    """The operators `routed_experts` and `autonomous_experts` of `ops` within `budget` bytes.

    The arguments are those of `reference.py`.
    """

    ops: Ops
    budget: int

    def routed_experts(
        self,
        x_TD: Tensor,
        probs_TK: Tensor,
        row_map: RowMap,
        w_gate_up_ED2F: Tensor,
        w_out_EFD: Tensor,
        *,
        main_gradients: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        def compute(x_TD: Tensor, probs_TK: Tensor, row_map: RowMap) -> Tensor:
            return self.ops.routed_experts(
                x_TD, probs_TK, row_map, w_gate_up_ED2F, w_out_EFD, main_gradients=main_gradients
            )

        values = 6 * w_out_EFD.size(1)
        return self._compute(compute, values, x_TD, probs_TK, row_map)

    def autonomous_experts(
        self,
        x_TD: Tensor,
        probs_TK: Tensor,
        row_map: RowMap,
        w_down_EDR: Tensor,
        w_up_ERW: Tensor,
        w_p_EDW: Tensor,
        w_out_EWD: Tensor,
        *,
        c_TKR: Tensor | None = None,
        norms_TK: Tensor | None = None,
        recompute_gate: bool = True,
        main_gradients: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        def compute(
            x_TD: Tensor,
            probs_TK: Tensor,
            row_map: RowMap,
            c_TKR: Tensor | None,
            norms_TK: Tensor | None,
        ) -> Tensor:
            return self.ops.autonomous_experts(
                x_TD,
                probs_TK,
                row_map,
                w_down_EDR,
                w_up_ERW,
                w_p_EDW,
                w_out_EWD,
                c_TKR=c_TKR,
                norms_TK=norms_TK,
                recompute_gate=recompute_gate,
                main_gradients=main_gradients,
            )

        _, rank, width = w_up_ERW.shape
        values = 6 * width + 3 * rank
        return self._compute(compute, values, x_TD, probs_TK, row_map, c_TKR, norms_TK)

    def _compute(
        self,
        compute: Compute,
        values_per_row: int,
        x_TD: Tensor,
        probs_TK: Tensor,
        row_map: RowMap,
        *others: Tensor | None,
    ) -> Tensor:
        most_rows = max(1, self.budget // (values_per_row * x_TD.element_size()))
        if row_map.slots_N.size(0) <= most_rows:
            return compute(x_TD, probs_TK, row_map, *others)
        sizes = tokens_of_parts(row_map, most_rows)
        experts_TK = experts_of_choices(row_map)
        # split, not slices: the gradient of a slice is as large as all of x.
        parts = zip(
            x_TD.split(sizes),
            probs_TK.split(sizes),
            experts_TK.split(sizes),
            *([None] * len(sizes) if other is None else other.split(sizes) for other in others),
            strict=True,
        )
        all_chosen = row_map.slots_N.size(0) == row_map.rows_TK.numel()

        def compute_part(
            x_TD: Tensor, probs_TK: Tensor, experts_TK: Tensor, *others: Tensor | None
        ) -> Tensor:
            num_rows = experts_TK.numel() if all_chosen else None
            part_map = self.ops.routing_map(experts_TK, row_map.counts_E.size(0), num_rows=num_rows)
            return compute(x_TD, probs_TK, part_map, *others)

        return torch.cat(
            [
                checkpoint(compute_part, *part, use_reentrant=False, preserve_rng_state=False)
                for part in parts
            ]
        )


def experts_of_choices(row_map: RowMap) -> Tensor:
    """The expert of each choice, as `routing_map` takes it: int64 [T, K]; -1: no row."""
    num_rows, counts_E = row_map.slots_N.size(0), row_map.counts_E
    experts_E = torch.arange(counts_E.size(0), device=counts_E.device)
    expert_N = experts_E.repeat_interleave(counts_E, output_size=num_rows)
    rows_TK = row_map.rows_TK
    return expert_N[rows_TK.clamp(min=0)].masked_fill(rows_TK < 0, -1)


def tokens_of_parts(row_map: RowMap, most_rows: int) -> list[int]:
    """The numbers of tokens of consecutive parts with at most `most_rows` rows, or with one token.

    If every token has all its choices, the host need not wait for the device.
    """
    num_tokens, k = row_map.rows_TK.shape
    if row_map.slots_N.size(0) == num_tokens * k:
        parts = math.ceil(num_tokens / max(1, most_rows // k))
        first, longer = divmod(num_tokens, parts)
        return [first + (part < longer) for part in range(parts)]
    ends_T = (row_map.rows_TK >= 0).sum(dim=1).cumsum(0).tolist()  # rows of the tokens up to each
    sizes, first, rows_before = [], 0, 0
    while first < num_tokens:
        end = max(bisect_right(ends_T, rows_before + most_rows, lo=first), first + 1)
        sizes.append(end - first)
        first, rows_before = end, ends_T[end - 1]
    return sizes
