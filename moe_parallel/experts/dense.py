"""Dense SwiGLU layers, by the linear layers of Megatron-Core with the products of our operators."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_parallel.experts.experts import AddsToMainGradients
from moe_parallel.ops import Ops, select_backend
from moe_parallel.ops.once import once_differentiable
from moe_parallel.parallel import all_gather_single, reduce_scatter_single


class OwnLinear(AddsToMainGradients):
    """What replaces Megatron-Core's product in both of its linear layers.

    Weights, shards, checkpoints and messages are Megatron-Core's. Its own sums into main gradients
    need a CUDA extension of NVIDIA's apex; `Ops.product` adds to them on every device.
    """

    ops: ClassVar[Ops] = select_backend("reference")

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: ProcessGroup | None,
        **_: Any,  # Megatron-Core's fusion, and the buffer of a deferred gradient: not used here
    ) -> Tensor:
        """[..., I] -> [..., O]. Megatron-Core calls this with the weight [O, I] of this rank.

        allreduce_dgrad: the gradient of the input is summed over `tp_group`.
        sequence_parallel: the input is this rank's share of the first dimension of [S, B, I].
        """
        weight, main = self.with_main_gradient(weight)
        group = tp_group if sequence_parallel or allreduce_dgrad else None
        y: Tensor = _Linear.apply(input, weight, main, self.ops, group, sequence_parallel)
        return y if bias is None else y + bias


class ColumnLinear(OwnLinear, ColumnParallelLinear):  # type: ignore[misc]
    """y = x W^T with the rows of W, the columns of y, divided over the tensor-parallel ranks."""


class RowLinear(OwnLinear, RowParallelLinear):  # type: ignore[misc]
    """y = x W^T with the columns of W and of x divided; y is summed over the ranks."""


def linear_by(ops: Ops) -> tuple[type[ColumnLinear], type[RowLinear]]:
    """The linear layers computed by `ops`."""
    own = {"ops": ops}
    return type("ColumnLinear", (ColumnLinear,), own), type("RowLinear", (RowLinear,), own)


class _Linear(torch.autograd.Function):
    """y = x W^T. With a group, the gradient of x is summed over it.

    Under sequence parallelism x is gathered for the product, and once more for the gradient of W,
    so that a rank keeps its own share only. Messages of the backward pass travel during products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        main_gradient_OI: Tensor | None,
        ops: Ops,
        group: ProcessGroup | None,
        is_shared_out: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.main_gradient_OI, ctx.ops, ctx.group = main_gradient_OI, ops, group
        ctx.is_shared_out = is_shared_out
        if is_shared_out:
            x, gathering = _gather(x, group)
            gathering.wait()
        y_NO: Tensor = ops.product(x.flatten(0, -2), weight_OI.t())
        return y_NO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        needs_dx, needs_dweight = ctx.needs_input_grad[:2]
        dy_NO = dy.flatten(0, -2)
        gathering = sending = dx = dweight_OI = None
        if ctx.is_shared_out and needs_dweight:
            x, gathering = _gather(x, ctx.group)
        if needs_dx:
            dx = ctx.ops.product(dy_NO, weight_OI).view(*dy.shape[:-1], -1)
            if ctx.is_shared_out:
                dx, sending = _reduce_scatter(dx, ctx.group)
            elif ctx.group is not None:
                sending = dist.all_reduce(dx, group=ctx.group, async_op=True)
        if gathering is not None:
            gathering.wait()
        if needs_dweight:
            dweight_OI = _add_dweight(ctx, dy_NO, x.flatten(0, -2))
        if sending is not None:
            sending.wait()
        return dx, dweight_OI, None, None, None, None


def _add_dweight(ctx: Any, dy_NO: Tensor, x_NI: Tensor) -> Tensor | None:
    """The gradient of the weight, or None after it was added to the main gradient."""
    if ctx.main_gradient_OI is None:
        dweight_OI: Tensor = ctx.ops.product(dy_NO.t(), x_NI)
        return dweight_OI
    ctx.ops.product(dy_NO.t(), x_NI, ctx.main_gradient_OI, accumulate=True)
    return None


def _gather(x_SBI: Tensor, group: Any) -> tuple[Tensor, dist.Work]:
    """The shares of all ranks, along the first dimension, once the message has arrived."""
    whole = x_SBI.new_empty(x_SBI.shape[0] * group.size(), *x_SBI.shape[1:])
    return whole, all_gather_single(whole, x_SBI.contiguous(), group, async_op=True)


def _reduce_scatter(x_SBI: Tensor, group: Any) -> tuple[Tensor, dist.Work]:
    """This rank's share of the sum, once the message has arrived."""
    share = x_SBI.new_empty(x_SBI.shape[0] // group.size(), *x_SBI.shape[1:])
    return share, reduce_scatter_single(share, x_SBI, group=group, async_op=True)


class DenseMLP(MLP):
    """Megatron-Core's MLP, split over the tensor-parallel ranks as there, with the same weights.

    Megatron-Core's keeps the input of SwiGLU, SiLU of the gate, a copy of the other half, and the
    output for the backward pass. This one keeps the input and the output. Shape suffixes: S
    sequence, B batch, D model width, F inner width on this rank, N = S * B.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        ops: Ops,
        tp_group: ProcessGroup,
        recomputes: bool = False,
        **_: Any,  # what versions of Megatron-Core pass to each layer
    ) -> None:
        """
        Args:
            config: ffn_hidden_size is the inner width over all ranks; there are no biases.
            submodules: the linear layers.
            ops: the operators.
            tp_group: the tensor-parallel ranks.
            recomputes: keep only the input for the backward pass.
        """
        width = config.ffn_hidden_size
        super().__init__(config, submodules, ffn_hidden_size=width, tp_group=tp_group)
        self.ops = ops
        self.recomputes = recomputes

    def forward(self, hidden_SBD: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """[S, B, D] -> ([S, B, D], None); with sequence parallelism, S is this rank's share."""
        if self.recomputes and torch.is_grad_enabled():
            y_SBD: torch.Tensor = checkpoint(self._output, False, hidden_SBD)
            return y_SBD, None
        return self._output(hidden_SBD), None

    def _output(self, hidden_SBD: torch.Tensor) -> torch.Tensor:
        gate_up_SB2F, _ = self.linear_fc1(hidden_SBD)
        h_NF = self.ops.swiglu_halves(gate_up_SB2F.flatten(0, 1))
        y_SBD: torch.Tensor
        y_SBD, _ = self.linear_fc2(h_NF.unflatten(0, gate_up_SB2F.shape[:2]))
        return y_SBD


def split_dense(config: TransformerConfig, width: int, ops: Ops, group: ProcessGroup) -> DenseMLP:
    """A dense layer of another width than the model's, split over `group`."""
    config = copy.copy(config)  # Megatron-Core takes the width from here, whatever the argument
    config.ffn_hidden_size = width
    column, row = linear_by(ops)
    return DenseMLP(config, MLPSubmodules(linear_fc1=column, linear_fc2=row), ops, group)
