"""Experts whose width tensor cores cannot read.

They read 16 bytes at a time, so each row must begin at a multiple of 16 bytes. The width of AoE's
experts follows from Eq. 5 of the paper and is often odd. On an H200 a model with such experts took
six times as long as one with routers (docs/performance/log.md). Zeros at the end of each expert's
columns change no result: silu(0) * 0 = 0, and it meets rows of zeros of the next matrix.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

LANES = 8  # 16-bit numbers in 16 bytes


def width_warning(width: int, step: int, *, is_padded: bool, remedy: str = "") -> str | None:
    """What to tell the user of experts of this width in 16 bits on a GPU; None: nothing.

    Args:
        width: of a whole expert.
        step: `LANES` times the ranks over which an expert is divided.
        is_padded: whether the layer pads them.
        remedy: the option with which it need not; empty: there is none.
    """
    if width % step == 0:
        return None
    what = f"experts are {width} wide, which is not a multiple of {step}"
    if is_padded:
        unless = f"; {remedy} needs none" if remedy else ""
        return f"{what}: each pass pads a copy of their weights{unless}"
    return f"{what}: tensor cores cannot read them, so they are several times slower"


def missing_columns(x: Tensor, width: int) -> int:
    """How many columns an expert lacks for tensor cores; 0 where they do not compute."""
    return -width % LANES if x.is_cuda and x.element_size() == 2 else 0


def padded_columns(w: Tensor, missing: int) -> Tensor:
    """[E, X, W] -> [E, X, W + missing]."""
    return pad(w, (0, missing))


def padded_rows(w: Tensor, missing: int) -> Tensor:
    """[E, W, X] -> [E, W + missing, X]."""
    return pad(w, (0, 0, 0, missing))


def zeros_for(main: Tensor | None, w: Tensor) -> Tensor | None:
    """A main gradient for the padded weight w; None if its weight has none."""
    return None if main is None else torch.zeros(w.shape, dtype=main.dtype, device=main.device)


def without_padding(gradient: Tensor, w: Tensor) -> Tensor:
    """The part of the gradient of a padded weight that belongs to w."""
    return gradient[tuple(slice(size) for size in w.shape)]
