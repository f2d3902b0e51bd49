"""The arguments and results of the operators that are not single tensors."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor


class RowMap(NamedTuple):
    """The two directions of one dispatch. A row is one token as one expert sees it.

    Rows are sorted by expert, then by token, then by choice. The N rows may include padding (with a
    capacity) and may lack choices (those given as -1).

    slots_N: int64, the flat slot `t * K + k` that fills row n; -1 for a padding row.
    rows_TK: int64, the row of choice k of token t; -1 if the choice is not dispatched.
    counts_E: int64, the rows per expert, including padding; they sum to N.
    """

    slots_N: Tensor
    rows_TK: Tensor
    counts_E: Tensor


class NormScores(NamedTuple):
    """The norms of all experts for each token, and the chosen experts.

    norms_TE: fp32 (fp64 for fp64 inputs), differentiable.
    experts_TK: int64, the chosen experts: by norm plus bias, largest first, or in the order that
        `chosen` returns.
    c_TKR: C = x W_e of the chosen experts, differentiable. None: nothing was kept.
    """

    norms_TE: Tensor
    experts_TK: Tensor
    c_TKR: Tensor | None = None


#: How much of C = x W_e `norm_topk` keeps: nothing, C of the chosen experts, or C of all experts.
Keep = Literal["nothing", "chosen", "all"]

#: The norms of `norm_topk` through which a gradient flows: all, or those of the chosen experts.
Gradient = Literal["all", "chosen"]

#: norms_TE -> experts_TK, int64; -1 is an empty slot.
Choose = Callable[[Tensor], Tensor]
