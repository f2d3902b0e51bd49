"""What the operators take and give besides tensors."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor


class RowMap(NamedTuple):
    """The two directions of one dispatch. A row is one token as one expert sees it.

    Rows are sorted by expert, inside an expert by token, inside a token by choice. N rows may
    hold padding (with a capacity) and may leave choices out (those given as -1).

    slots_N: int64, the flat choice `t * K + k` that fills row n; -1 for a padding row.
    rows_TK: int64, the row of choice k of token t; -1 where it is not dispatched.
    counts_E: int64: rows per expert, padding included; they sum to N.
    """

    slots_N: Tensor
    rows_TK: Tensor
    counts_E: Tensor


class NormScores(NamedTuple):
    """Norms of all experts for each token, and which experts were chosen by them.

    norms_TE: fp32 (fp64 for fp64 inputs), differentiable.
    experts_TK: int64, the chosen; by falling rank, or in the order of `chosen`.
    c_TKR: C = x W_e of the chosen experts, differentiable; None: nothing was kept.
    """

    norms_TE: Tensor
    experts_TK: Tensor
    c_TKR: Tensor | None = None


#: How much of C = x W_e `norm_topk` keeps: none of it, that of the chosen experts, or all.
Keep = Literal["nothing", "chosen", "all"]

#: Which norms of `norm_topk` pass a gradient on: all, or those of the chosen experts.
Gradient = Literal["all", "chosen"]

#: norms_TE -> experts_TK, int64, -1: an empty slot.
Choose = Callable[[Tensor], Tensor]
