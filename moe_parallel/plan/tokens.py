"""The tokens and rows of a micro-batch on a rank, and the tensors that are kept of them."""

from __future__ import annotations

from dataclasses import dataclass

from moe_parallel.plan.layout import Layout
from moe_parallel.plan.shape import Shape


@dataclass(frozen=True)
class Kept:
    """A tensor that is kept for the backward pass."""

    name: str
    part: str
    nbytes: int
    of_norm: bool = False  # the output of a norm, which can be computed again from its input


@dataclass(frozen=True)
class TokenCounts:
    """The numbers of tokens of a micro-batch, and of rows, that a rank has at a time."""

    all: int  # t, those of the rank's share of the sequences
    between: int  # between tensor-parallel regions: t, or t / tp with sequence parallelism
    routed: int  # t / tp, which a rank routes
    slots: int  # of the routed tokens in the tables of choices: K t / tp, or n t / tp
    sent: int  # rows of the routed tokens' choices: K t / tp
    received: int  # rows that a rank's experts compute, if loads are balanced


def tokens_of(shape: Shape, layout: Layout) -> TokenCounts:
    """The tokens of a micro-batch of a layout."""
    every = shape.seq_length // layout.cp * layout.micro_batch
    routed = every // layout.tp
    sent = shape.experts.rows(routed) if shape.experts else 0
    return TokenCounts(
        all=every,
        between=every // (layout.tp if layout.sequence_parallel else 1),
        routed=routed,
        slots=routed * shape.experts.slots if shape.experts else 0,
        sent=sent,
        received=sent * layout.etp,
    )
