"""What the operators take and give besides tensors."""

from typing import NamedTuple

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


class Scores(NamedTuple):
    """Norms of all experts for each token, and who ranks highest.

    norms_TE: fp32 (fp64 for fp64 inputs), differentiable.
    experts_TK: int64, by falling rank.
    activations_TKR: C = x W_e of these experts, differentiable; None: not asked for.
    """

    norms_TE: Tensor
    experts_TK: Tensor
    activations_TKR: Tensor | None = None
