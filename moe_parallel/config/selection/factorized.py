"""W_g = W_down W_up of low rank: how W_up starts, and how wide an expert is that has it."""

from __future__ import annotations

#: How W_up starts: see `up_std`.
UP_INIT_METHODS = ("normal", "scaled")


def up_std(method: str, low_rank_size: int) -> float | None:
    """Standard deviation of initial W_up; None: that of the other weights.

    By tokens x of RMS 1, x W_g starts with a standard deviation of s sqrt(d) where weights have s.
    x W_down has s sqrt(d) as well, and W_up adds up d_low of its numbers: N(0, 1 / d_low) keeps
    the size, and N(0, s^2) leaves s sqrt(d_low) of it.
    """
    return low_rank_size**-0.5 if method == "scaled" else None


def aoe_wide_size(hidden_size: int, ffn_hidden_size: int, low_rank_size: int) -> int:
    """d_wide of Eq. 5, rounded: an AoE expert with as many parameters as a SwiGLU expert.

    AoE expert: d_low d + d_low d_wide + 2 d d_wide; SwiGLU expert: 3 d d_ffn.
    """
    d, d_ffn, d_low = hidden_size, ffn_hidden_size, low_rank_size
    return round((3 * d * d_ffn - d_low * d) / (d_low + 2 * d))
