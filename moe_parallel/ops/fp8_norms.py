"""Norms of x W_down with x and W_down rounded to FP8: they select the norms to compute exactly.

Shape suffixes are those of reference.py; X counts the columns of all experts, E R.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
TILE_BYTES = 32 << 20  # bytes of products in memory at a time


def fp8_norms(x_TD: Tensor, w_EDR: Tensor) -> Tensor:
    """||x W_down||, x and W_down rounded to e4m3, summed in fp32: fp32 [T, E], without gradient.

    Each token and each expert is scaled so that its largest entry becomes the largest e4m3 number.
    With one scale for all tokens, one token could change the choices of another.
    """
    num_experts, _, rank = w_EDR.shape
    x_TD, w_EDR = x_TD.detach().float(), w_EDR.detach().float()
    x_scale_T1, w_scale_E11 = _scale(x_TD, (1,)), _scale(w_EDR, (1, 2))
    x8_TD = (x_TD / x_scale_T1).to(E4M3)
    w8_XD = (w_EDR / w_scale_E11).transpose(1, 2).flatten(0, 1).to(E4M3)
    multiply = _on_tensor_cores if _has_tensor_cores(x8_TD, w8_XD) else _emulated
    tile = max(TILE_BYTES // (4 * num_experts * rank), 64)
    norms_TE = torch.cat(
        [
            torch.linalg.vector_norm(multiply(x8, w8_XD).unflatten(1, (num_experts, rank)), dim=-1)
            for x8 in x8_TD.split(tile)
        ]
    )
    return norms_TE * x_scale_T1 * w_scale_E11.flatten()


def _scale(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The divisors that scale the values to e4m3; 1 for zeros."""
    # Not by a number: a GPU would multiply by its reciprocal, and numbers between two of e4m3 would
    # be rounded to the other one.
    largest = torch.full((), torch.finfo(E4M3).max, device=values.device)
    scale = values.abs().amax(dims, keepdim=True) / largest
    return torch.where(scale == 0, 1, scale)


def _has_tensor_cores(x8_TD: Tensor, w8_XD: Tensor) -> bool:
    if not x8_TD.is_cuda or torch.cuda.get_device_capability(x8_TD.device) < (8, 9):
        return False
    return len(x8_TD) > 0 and all(size % 16 == 0 for size in w8_XD.shape)


def _on_tensor_cores(x8_TD: Tensor, w8_XD: Tensor) -> Tensor:
    one = torch.ones((), device=x8_TD.device)
    return torch._scaled_mm(x8_TD, w8_XD.t(), one, one, out_dtype=torch.float32)


def _emulated(x8_TD: Tensor, w8_XD: Tensor) -> Tensor:
    return x8_TD.float() @ w8_XD.float().t()
