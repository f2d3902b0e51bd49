"""A factorized W_g = W_down W_up: the initial W_up, and the width of an expert."""

from __future__ import annotations

#: The initializations of W_up: see `up_std`.
UP_INIT_METHODS = ("normal", "scaled")


def up_std(method: str, low_rank_size: int) -> float | None:
    """The standard deviation of the initial W_up. None: that of the other weights.

    Let tokens x have an RMS of 1, and weights a standard deviation of s. Then x W_g and x W_down
    both start with a standard deviation of s sqrt(d). Each number of x W_down W_up is a sum over
    d_low numbers of x W_down. With N(0, 1 / d_low) for W_up, the standard deviation stays the
    same. With N(0, s^2) it is multiplied by s sqrt(d_low).
    """
    return low_rank_size**-0.5 if method == "scaled" else None


def aoe_wide_size(hidden_size: int, ffn_hidden_size: int, low_rank_size: int) -> int:
    """d_wide by Eq. 5, rounded: an AoE expert then has as many parameters as a SwiGLU expert.

    AoE expert: d_low d + d_low d_wide + 2 d d_wide. SwiGLU expert: 3 d d_ffn.
    """
    d, d_ffn, d_low = hidden_size, ffn_hidden_size, low_rank_size
    return round((3 * d * d_ffn - d_low * d) / (d_low + 2 * d))
