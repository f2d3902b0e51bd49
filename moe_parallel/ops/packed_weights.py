"""The specification of packed weights, copies that change only the time of products."""

from torch import Tensor


def pack_weights(w_EIO: Tensor, parts: int = 1) -> list[Tensor]:
    """Copies of experts' weights in the layout in which products read w and its transpose.

    An operator on experts that gets them as `packed`, for each weight these two, takes less time
    and computes the same. They are valid until the weights change, and carry no gradient. A copy is
    empty, [E, 0], where products do not read it; in this reference both are.

    parts: number of matrices that lie side by side in the columns of w, as W_g and W_p do.
    """
    return [w_EIO.new_empty(w_EIO.size(0), 0) for _ in ("w", "its transpose")]
