"""SwiGLU that also multiplies each row by its prob, and SwiGLU of two halves of a tensor."""

from typing import Any

import torch
from torch import Tensor

from moe_parallel.ops.native.fake import fake, fake_like
from moe_parallel.ops.once import once_differentiable
from moe_parallel.ops.reference import accumulation_dtype

_ops = torch.ops.moe_parallel


def swiglu(gate_NF: Tensor, up_NF: Tensor, probs_N: Tensor | None = None) -> Tensor:
    if probs_N is not None:
        probs_N = probs_N.to(accumulation_dtype(gate_NF.dtype))
    return _ops.swiglu(gate_NF, up_NF, probs_N)


fake_like("swiglu", "gate")


@fake("swiglu_backward")
def _(gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dprobs = gate.new_empty(gate.size(0), dtype=accumulation_dtype(gate.dtype))
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), dprobs


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


@once_differentiable
def _backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    gate, up, probabilities = ctx.saved_tensors
    dgate, dup, dprobs = _ops.swiglu_backward(dh, gate, up, probabilities)
    return dgate, dup, None if probabilities is None else dprobs


torch.library.register_autograd("moe_parallel::swiglu", _backward, setup_context=_save)


def swiglu_halves(gate_up_N2F: Tensor) -> Tensor:
    return _ops.swiglu_halves(gate_up_N2F)


@fake("swiglu_halves")
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.size(0), gate_up.size(1) // 2)


fake_like("swiglu_halves_backward", "gate_up")


@once_differentiable
def _halves_backward(ctx: Any, dh: Tensor) -> Tensor:
    (gate_up,) = ctx.saved_tensors
    return _ops.swiglu_halves_backward(dh, gate_up)


torch.library.register_autograd(
    "moe_parallel::swiglu_halves", _halves_backward, setup_context=_save
)
