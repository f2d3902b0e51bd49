"""Where the rows of a dispatched batch come from and go to."""

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
