"""SwiGLU experts: E_i(x) = (SiLU(x W_g) * (x W_p)) W_o (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from moe_parallel.dispatch.dispatched import Dispatched
from moe_parallel.experts.parameters import ExpertParameters, Matrices
from moe_parallel.ops import Ops, RowMap
from moe_parallel.ops.reference import add_gradient_to
from moe_parallel.parallel import Groups


class SwiGLUExperts(ExpertParameters):
    """The routed experts of this rank. W_g and W_p are one tensor, so that x is read once.

    Shape suffixes: M rows received, J choices of each, L experts here, D model width, F expert
    width here (divided by etp).
    """

    w_gate_up_LD2F: torch.Tensor  # W_g at index 0, W_p at index 1 of the axis of size 2
    w_out_LFD: torch.Tensor

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        groups: Groups,
        ops: Ops,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(num_experts, groups, dtype)
        self.ops = ops
        self.add_weight("w_gate_up_LD2F", (hidden_size, 2, ffn_hidden_size), sharded_axis=3)
        self.add_weight("w_out_LFD", (ffn_hidden_size, hidden_size), sharded_axis=1)

    def gates(self) -> torch.Tensor:
        """W_g of this rank's experts, for a loss on weights: [L, D, F]."""
        for hook in self._forward_pre_hooks.values():  # they wait for weights that are gathered
            hook(self, ())
        (w_LDX,), main = self.matrices(self.w_gate_up_LD2F)
        if main is not None:
            w_LDX = add_gradient_to(main[0], w_LDX)
        return w_LDX.unflatten(2, (2, -1))[:, :, 0]

    def outputs_of_parts(
        self, rows: Iterable[Dispatched[Any]], parts: int
    ) -> Iterator[torch.Tensor]:
        """`forward` for one of `parts` parts of the experts after the other."""
        weights = self.matrices_of_parts(parts, self.w_gate_up_LD2F, self.w_out_LFD)
        for each, of_part in zip(rows, weights, strict=True):
            yield self(each.x_MD, each.probs_MJ, each.row_map, of_part)

    def forward(
        self,
        x_MD: torch.Tensor,
        probs_MJ: torch.Tensor,
        row_map: RowMap,
        of_part: Matrices | None = None,
    ) -> torch.Tensor:
        """The sum of prob * E_i(x) over each token's choices: [M, D].

        With etp > 1 it is this rank's part of the sum over F. `of_part`: the weights of the part of
        the experts whose rows these are; None: all.
        """
        weights, main = of_part or self.matrices(self.w_gate_up_LD2F, self.w_out_LFD)
        return self.ops.routed_experts(x_MD, probs_MJ, row_map, *weights, main_gradients=main)
