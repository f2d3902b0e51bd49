"""The experts of a rank, all computed at once: their weights, SwiGLU experts, and AoE's.

    SwiGLU    E_i(x) = (SiLU(x W_g) * (x W_p)) W_o                Shazeer 2020
    AoE       E_i(x) = (SiLU(x W_down W_up) * (x W_p)) W_o        AoE paper, Algorithm 2

Megatron-Core's data parallelism holds `weight.main_grad`, the sum over the micro-batches of a step,
in fp32. A hook adds each gradient from autograd to it. A kernel that adds to it directly saves that
pass over memory, the intermediate gradient, and its rounding to the dtype of the weights. The
attribute `grad_added_to_main_grad` makes the hook ignore the gradient from autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from moe_parallel.dispatch.dispatched import Dispatched
from moe_parallel.ops import Ops, RowMap
from moe_parallel.ops.reference import add_gradient_to
from moe_parallel.parallel import Groups


class AddsToMainGradients:
    """A module whose backward pass can add weight gradients to `main_grad` of its weights."""

    adds_to_main_gradients = False

    def add_to_main_gradients(self) -> None:
        """From now on, backward passes add to each weight's `main_grad`, made by Megatron-Core."""
        self.adds_to_main_gradients = True

    def with_main_gradient(self, weight: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`weight` as an operator takes it, and the main gradient to which the operator adds.

        None: it adds to none, and returns the gradient.
        """
        if not (self.adds_to_main_gradients and weight.requires_grad):
            return weight, None
        return gradient_in_main_grad(weight), weight.main_grad


def gradient_in_main_grad(weight: torch.Tensor) -> torch.Tensor:
    """`weight`, for an operator that adds its gradient to `weight.main_grad` and returns none."""
    return _GradientInMainGrad.apply(weight)


class _GradientInMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: None) -> torch.Tensor:
        """A meaningless gradient: the hook must be called, and with overlap it needs a tensor."""
        assert gradients == (None,), "an operator handed a gradient on that it has added already"
        ctx.weight.grad_added_to_main_grad = True
        if getattr(ctx.weight, "zero_out_wgrad", False):  # the hook adds it in this case
            return torch.zeros_like(ctx.weight)
        return torch.empty_like(ctx.weight)


ShardedStateDict = dict[str, Any]
#: The weights of some experts as operators take them, and their main gradients (None: not used).
Matrices = tuple[list[torch.Tensor], Any]


class ShardedModule(nn.Module):
    """A module whose checkpoints are those of a Megatron-Core module."""

    def sharded_state_dict(self, *arguments: Any, **named: Any) -> ShardedStateDict:
        """The weights here, and what each submodule says of its own."""
        from megatron.core.transformer.module import MegatronModule

        return MegatronModule.sharded_state_dict(self, *arguments, **named)


class ExpertParameters(AddsToMainGradients, nn.Module):
    """The stacked weights of this rank's experts. Axis 0 counts experts; another axis is sharded.

    A subclass declares its weights with `add_weight` and computes with them. The weights are not
    initialized here. `model.initialization` fills them with values that do not depend on the
    layout.
    """

    def __init__(self, num_experts: int, groups: Groups, dtype: torch.dtype) -> None:
        """
        Args:
            num_experts: E, over all ranks; ep divides it.
            groups: ep splits the experts; etp splits the sharded axis of each weight.
            dtype: the dtype of the weights.
        """
        super().__init__()
        self.groups = groups
        self.num_local_experts = num_experts // groups.ep.size()
        self.dtype = dtype
        self._sharded_axis: dict[str, int] = {}

    def add_weight(
        self,
        name: str,
        shape: tuple[int, ...],
        sharded_axis: int,
        init_std: float | None = None,
    ) -> None:
        """Register the weight `name`, [L, *shape], with `sharded_axis` (L is 0) split over etp.

        `init_std`: the standard deviation of its initial values. None: that of the other weights.
        """
        full = (self.num_local_experts, *shape)
        shards = self.groups.etp.size()
        assert full[sharded_axis] % shards == 0, (name, full, shards)
        local = list(full)
        local[sharded_axis] //= shards
        weight = nn.Parameter(torch.empty(local, dtype=self.dtype))
        mark_expert_weight(weight, self.groups, sharded_axis)
        weight.init_std = init_std  # type: ignore[attr-defined]
        self.register_parameter(name, weight)
        self._sharded_axis[name] = sharded_axis

    def local(self, weight: torch.Tensor) -> torch.Tensor:
        """The part [L, ...], for this rank's experts, of a weight [E, ...] of all experts."""
        first = self.groups.ep.rank() * self.num_local_experts
        return weight[first : first + self.num_local_experts]

    def matrices(self, *weights: torch.Tensor) -> Matrices:
        """The weights as [L, I, O], for operators, and their main gradients (None: not used)."""
        if not self.adds_to_main_gradients:
            return [weight.flatten(2) for weight in weights], None
        main_gradients = [w.main_grad for w in weights]  # type: ignore[attr-defined]
        return (
            [gradient_in_main_grad(weight).flatten(2) for weight in weights],
            tuple(main.view(*main.shape[:2], -1) for main in main_gradients),
        )

    def matrices_of_parts(self, parts: int, *weights: torch.Tensor) -> list[Matrices]:
        """`matrices` of each of `parts` parts of the experts. Each has L / parts of them.

        All parts are views of one split. Their gradients are joined once, when all are there.
        """
        whole, main = self.matrices(*weights)
        splits = [split_experts(weight, parts) for weight in whole]
        if main is None:
            return [(list(of_part), None) for of_part in zip(*splits, strict=True)]
        mains = zip(*(split_experts(each, parts) for each in main), strict=True)
        return [(list(ws), of_part) for *ws, of_part in zip(*splits, mains, strict=True)]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Each weight as a shard of a tensor [E, *shape] of all experts."""
        return {
            prefix + name: shard_of_experts(
                prefix + name, weight, self._sharded_axis[name], self.groups, sharded_offsets
            )
            for name, weight in self.named_parameters()
        }


def split_experts(weight_LX: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
    """The weights of each part of the experts, as views of one split."""
    return weight_LX.split(len(weight_LX) // parts)


def shard_of_experts(
    key: str,
    weight: torch.Tensor,
    sharded_axis: int,
    groups: Groups,
    sharded_offsets: tuple[tuple[int, int, int], ...],
) -> Any:
    """This rank's part [L, ...] of a tensor [E, ...] with one axis split over etp: Megatron-Core's
    ShardedTensor."""
    from megatron.core.dist_checkpointing import ShardedTensor

    before = len(sharded_offsets)
    return ShardedTensor.from_rank_offsets(
        key,
        weight,
        *sharded_offsets,
        (before, groups.ep.rank(), groups.ep.size()),
        (before + sharded_axis, groups.etp.rank(), groups.etp.size()),
        replica_id=(0, 0, groups.edp.rank()),
        prepend_axis_num=before,
    )


def mark_expert_weight(weight: nn.Parameter, groups: Groups, sharded_axis: int) -> None:
    """Sets the attributes by which Megatron-Core reduces, counts and saves an expert weight.

    The gradient is reduced over expert-data-parallel ranks instead of data-parallel ranks if the
    two differ, that is, with ep > 1 or etp != tp. In the gradient norm the weight is never a
    tensor-parallel duplicate: etp ranks hold different shards, and ranks with equal shards are in
    edp.
    """
    same_as_dense = groups.ep.size() == 1 and groups.etp.size() == groups.tp.size()
    weight.allreduce = same_as_dense  # type: ignore[attr-defined]
    weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    weight.partition_dim = sharded_axis  # type: ignore[attr-defined]
    weight.partition_stride = 1  # type: ignore[attr-defined]


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


class LowRankExperts(ExpertParameters):
    """The experts of this rank without W_down, which belongs to the layer.

    Every rank needs W_down of all experts for the selection. If C = x W_down of the choices is
    given, it is used. Otherwise it is recomputed from x: the row of x (d numbers) is sent anyway,
    C would add d_low numbers, and the product is small.

    Shape suffixes: M rows received, J choices of each, L experts here, D model width, R low-rank
    size (d_low), W wide size here (d_wide divided by etp).
    """

    w_up_LRW: torch.Tensor
    w_p_LDW: torch.Tensor
    w_out_LWD: torch.Tensor

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        low_rank_size: int,
        wide_size: int,
        groups: Groups,
        ops: Ops,
        dtype: torch.dtype,
        recompute_gate: bool = True,
        up_std: float | None = None,
    ) -> None:
        """
        Args:
            recompute_gate: recompute C W_up in the backward pass instead of keeping it.
            up_std: the standard deviation of the initial W_up. None: that of the other weights.
        """
        super().__init__(num_experts, groups, dtype)
        self.ops = ops
        self.recompute_gate = recompute_gate
        self.add_weight("w_up_LRW", (low_rank_size, wide_size), sharded_axis=2, init_std=up_std)
        self.add_weight("w_p_LDW", (hidden_size, wide_size), sharded_axis=2)
        self.add_weight("w_out_LWD", (wide_size, hidden_size), sharded_axis=1)

    def outputs_of_parts(
        self, rows: Iterable[Dispatched[Any]], w_down_LDR: torch.Tensor, parts: int
    ) -> Iterator[torch.Tensor]:
        """`forward` for one of `parts` parts of the experts after the other."""
        weights = self.matrices_of_parts(parts, self.w_up_LRW, self.w_p_LDW, self.w_out_LWD)
        down = split_experts(w_down_LDR, parts)
        for each, w_down, of_part in zip(rows, down, weights, strict=True):
            assert each.norms_MJ is None  # only the local dispatcher passes them on
            yield self(each.x_MD, each.probs_MJ, each.row_map, w_down, each.c_MJR, of_part=of_part)

    def forward(
        self,
        x_MD: torch.Tensor,
        probs_MJ: torch.Tensor,
        row_map: RowMap,
        w_down_LDR: torch.Tensor,
        c_MJR: torch.Tensor | None = None,
        norms_MJ: torch.Tensor | None = None,
        of_part: Matrices | None = None,
    ) -> torch.Tensor:
        """The sum of prob * E_i(x) over each token's choices: [M, D].

        With etp > 1 it is this rank's part of the sum over W. With the norms of C, the probs are
        their softmax, and the backward pass goes on through them to x and W_down. `of_part`: the
        weights, but W_down, of the part of the experts whose rows these are; None: all.
        """
        weights, main = of_part or self.matrices(self.w_up_LRW, self.w_p_LDW, self.w_out_LWD)
        return self.ops.autonomous_experts(
            x_MD,
            probs_MJ,
            row_map,
            w_down_LDR,
            *weights,
            c_TKR=c_MJR,
            norms_TK=norms_MJ,
            recompute_gate=self.recompute_gate,
            main_gradients=main,
        )
