"""Rotary position embeddings of queries and keys, in plain torch (arXiv 2104.09864).

Shape suffixes: S sequence, B batch (Megatron's order), H and G heads of queries and of keys, C
width of a head, X = (H / G + 2) C.
"""

import torch
from torch import Tensor


def rotary(q_SBHC: Tensor, k_SBGC: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates each pair (x[i], x[C/2 + i]) of a head by the angle [i] of its token.

    Computed in fp32 for bf16 and fp16, and rounded once to the dtype of q and k. The angles have no
    gradient.

    angles: [S, 1, 1, C], or [S, B, 1, C] if the sequences have their own; in Megatron-Core's layout
        the second half of C repeats the first.
    """
    return _rotated(q_SBHC, angles), _rotated(k_SBGC, angles)


def split_and_rotate(qkv_SBGX: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, rotated as by `rotary`, and values: q_SBHC, k_SBGC, v_SBGC.

    qkv_SBGX: the output of one linear layer, in Megatron-Core's order: for each head of keys the
        H / G heads of queries that share it, the head of keys, and that of values.

    None of the results is a view, so that nothing keeps qkv for the backward pass.
    """
    width = angles.shape[-1]
    q_SBGX, k_SBGC, v_SBGC = qkv_SBGX.split([qkv_SBGX.shape[-1] - 2 * width, width, width], dim=-1)
    q_SBHC = q_SBGX.unflatten(-1, (-1, width)).flatten(2, 3)
    return *rotary(q_SBHC, k_SBGC, angles), v_SBGC.clone(memory_format=torch.contiguous_format)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    half = angles[..., : angles.shape[-1] // 2].to(wide)
    cos, sin = half.cos(), half.sin()
    first, second = x.to(wide).chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)
