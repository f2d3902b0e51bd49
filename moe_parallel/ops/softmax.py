"""The softmax of logits and the gradient of a loss through it, in plain torch.

The two steps leave room for a sum: ranks that divide the vocabulary add up their sums between them.

Shape suffixes: R rows, V logits of a row.
"""

import torch
from torch import Tensor


def softmax_sums(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, and the sum of exp(logit - largest).

    Both [R], in fp32, or in fp64 for fp64. V is at least 1. They have no gradient.
    """
    with torch.no_grad():
        wide_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
        most_R = wide_RV.amax(1)
        return most_R, (wide_RV - most_R[:, None]).exp_().sum(1)


def softmax_gradient(logits_RV: Tensor, labels_R: Tensor, most_R: Tensor, sums_R: Tensor) -> None:
    """The gradient of -log softmax(logits)[label], written over the logits.

    It is exp(logit - most) / sum, less 1 at the label, rounded once to the dtype of the logits.

    logits_RV: contiguous.
    labels_R: int64. A label that is not one of the V columns belongs to another rank.
    most_R, sums_R: those of `softmax_sums`, or of the whole vocabulary.
    """
    with torch.no_grad():
        p_RV = (logits_RV.to(most_R.dtype) - most_R[:, None]).exp_()
        p_RV /= sums_R[:, None]
        width = logits_RV.shape[1]
        here_R = (labels_R >= 0) & (labels_R < width)
        p_RV.scatter_add_(1, labels_R.clamp(0, width - 1)[:, None], -here_R[:, None].to(p_RV.dtype))
        logits_RV.copy_(p_RV)
