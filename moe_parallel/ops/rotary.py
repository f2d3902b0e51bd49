"""Rotary position embeddings of queries and keys, in plain torch (arXiv 2104.09864).

Shape suffixes: S sequence, B batch (Megatron's order), H and G heads of queries and of keys, C
width of a head.
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


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    half = angles[..., : angles.shape[-1] // 2].to(wide)
    cos, sin = half.cos(), half.sin()
    first, second = x.to(wide).chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)
