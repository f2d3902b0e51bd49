"""What an autonomous selection yields."""

from typing import NamedTuple

from torch import Tensor


class Scores(NamedTuple):
    """Norms of all experts for each token, and who ranks highest.

    norms_TE: fp32 (fp64 for fp64 inputs), differentiable.
    experts_TK: int64, by falling rank.
    activations_TKR: C = x W_e of these experts, differentiable; None: not asked for.
    """

    norms_TE: Tensor
    experts_TK: Tensor
    activations_TKR: Tensor | None = None
