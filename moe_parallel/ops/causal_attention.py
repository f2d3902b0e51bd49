"""Causal attention: its definition in plain torch, and where the native operator computes it.

Shape suffixes: S sequence, B batch, H heads of queries, G heads of keys and values, C width of a
head, R = H / G heads that share one.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor

from moe_parallel.ops import extension

#: The native operator's blocks are made for heads up to this width.
WIDEST_HEAD = 256


def attention(q_SBHC: Tensor, k_SBGC: Tensor, v_SBGC: Tensor, scale: float) -> Tensor:
    """out_SBHC = softmax(scale q k^T) v, where a token attends to itself and to earlier ones.

    scale: positive.

    For bf16 and fp16, sums and the softmax are in fp32, and the output is rounded once. This
    definition writes and keeps S x S scores of each head; the native operator keeps its inputs, the
    output, and one fp32 number per token and head.
    """
    length, _, heads, _ = q_SBHC.shape
    groups = k_SBGC.size(2)
    wide = torch.float64 if q_SBHC.dtype == torch.float64 else torch.float32
    q_SBGRC = q_SBHC.to(wide).unflatten(2, (groups, heads // groups))
    scores_BGRST = torch.einsum("sbgrc,tbgc->bgrst", q_SBGRC, k_SBGC.to(wide)) * scale
    later_ST = torch.ones(length, length, dtype=torch.bool, device=q_SBHC.device).triu(1)
    weights_BGRST = scores_BGRST.masked_fill(later_ST, -torch.inf).softmax(-1)
    out_SBGRC = torch.einsum("bgrst,tbgc->sbgrc", weights_BGRST, v_SBGC.to(wide))
    return out_SBGRC.flatten(2, 3).to(q_SBHC.dtype)


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the native operator computes attention of these tensors, and faster than torch.

    It is on an x86-64 processor with AVX-512, where oneDNN's kernel multiplies its blocks, and on
    AMD's with AVX2. Not measured, so left to torch: Intel's without AVX-512, and in bf16 Intel's
    without AMX.
    """
    width = q.shape[-1]
    fits = (
        q.device.type == k.device.type == v.device.type == "cpu"
        and q.dtype == k.dtype == v.dtype
        and q.dtype in (torch.float32, torch.bfloat16)
        and k.shape == v.shape
        and q.shape[:2] == k.shape[:2]
        and width == k.shape[-1]
        and width % 2 == 0
        and width <= WIDEST_HEAD
    )
    module = _extension() if fits else None
    return module is not None and module.has_fast_attention(in_bf16=q.dtype == torch.bfloat16)


@functools.cache
def _extension() -> ModuleType | None:
    return extension.load() if extension.is_built() else None
