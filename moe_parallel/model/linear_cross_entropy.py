"""The loss of a language model's head, without the logits of a micro-batch.

Shape suffixes: T tokens, R tokens of a chunk, D model width, V vocabulary entries of this
tensor-parallel rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_parallel.ops import Ops
from moe_parallel.platform.device import fast_factors


def linear_cross_entropy(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    labels_T: torch.Tensor,
    weights_T: torch.Tensor,
    group: dist.ProcessGroup,
    chunk_size: int,
    ops: Ops,
    vocab_size: int | None = None,
    main_gradient_VD: torch.Tensor | None = None,
) -> torch.Tensor:
    """-log softmax(h W^T)[label] for each token, fp32 [T]; the vocabulary is divided over `group`.

    Logits exist for `chunk_size` tokens at a time. Both gradients are computed with them in the
    forward pass, so nothing is computed twice (as in Liger Kernel, arXiv 2410.10989). The gradient
    of W needs the gradient of each loss, which the forward pass does not have; it is taken to be
    proportional to `weights_T`, as in a weighted mean of the losses.

    Args:
        h_TD: the hidden states; the same on all ranks of `group`. Its gradient is this rank's part
            of a sum over `group`.
        w_VD: this rank's rows of the head, in the dtype of h.
        labels_T: int64, in the whole vocabulary.
        weights_T: fp32, the weight of each loss, up to one factor.
        group: the tensor-parallel ranks.
        chunk_size: tokens whose logits exist at a time, >= 1.
        ops: the operators.
        vocab_size: entries from this number on have probability 0; None: there are none.
        main_gradient_VD: fp32; the backward pass adds the gradient of W to it and returns none.

    Raises RuntimeError in the backward pass, on a CPU, if the gradient of the losses is not
    proportional to the weights. (On a GPU the check would wait for the device.) Also if the
    gradient of W is wanted a second time: the first pass scales it where it is.
    """
    h_TD, w_VD = fast_factors(h_TD, w_VD)
    losses_T: torch.Tensor = _LinearCrossEntropy.apply(
        h_TD, w_VD, labels_T, weights_T, group, chunk_size, ops, vocab_size, main_gradient_VD
    )
    return losses_T


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_TD: torch.Tensor,
        w_VD: torch.Tensor,
        labels_T: torch.Tensor,
        weights_T: torch.Tensor,
        group: dist.ProcessGroup,
        chunk_size: int,
        ops: Ops,
        vocab_size: int | None,
        main_gradient_VD: torch.Tensor | None,
    ) -> torch.Tensor:
        first = group.rank() * w_VD.shape[0]  # of this rank's vocabulary entries
        losses_T = h_TD.new_empty(len(h_TD), dtype=torch.float32)
        known = len(w_VD) if vocab_size is None else max(vocab_size - first, 0)
        learns = any(ctx.needs_input_grad[:2])
        if learns:
            dh_TD = torch.empty_like(h_TD)
            dw_VD = torch.zeros_like(w_VD, dtype=torch.float32)
        memory_RV = h_TD.new_empty(min(chunk_size, len(h_TD)), len(w_VD))  # of each chunk's logits
        for start in range(0, len(h_TD), chunk_size):
            rows = slice(start, start + chunk_size)
            h_RD = h_TD[rows]
            logits_RV = ops.product(h_RD, w_VD.t(), memory_RV[: len(h_RD)])
            # Not -inf: a rank may have none but such entries, and -inf minus -inf is no number.
            if known < len(w_VD):
                logits_RV[:, known:] = torch.finfo(logits_RV.dtype).min
            label_R = labels_T[rows] - first
            losses_T[rows], most_R, sums_R = _losses(logits_RV, label_R, group, ops)
            if not learns:
                continue
            ops.softmax_gradient(logits_RV, label_R, most_R, sums_R)
            dlogits_RV = logits_RV
            ops.product(dlogits_RV, w_VD, dh_TD[rows])
            weighted_RD = h_RD * weights_T[rows, None].to(h_RD.dtype)
            ops.product(dlogits_RV.t(), weighted_RD, dw_VD, accumulate=True)
        if learns:
            ctx.save_for_backward(dh_TD, dw_VD, weights_T)
            ctx.dtype, ctx.main_gradient_VD = w_VD.dtype, main_gradient_VD
        return losses_T

    @staticmethod
    def backward(ctx: Any, dlosses_T: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        dh_TD, dw_VD, weights_T = ctx.saved_tensors
        squares = weights_T.dot(weights_T)
        factor = dlosses_T.dot(weights_T) / torch.where(squares == 0, 1, squares)
        if not dlosses_T.is_cuda and not torch.allclose(
            dlosses_T, factor * weights_T, rtol=1e-4, atol=0
        ):
            raise RuntimeError("the gradient of the losses is not proportional to their weights")
        dh_TD = dh_TD * dlosses_T[:, None].to(dh_TD.dtype)
        if ctx.main_gradient_VD is None:
            dweight_VD = dw_VD.mul_(factor).to(ctx.dtype)
        else:
            dweight_VD = None
            ctx.main_gradient_VD.addcmul_(dw_VD, factor)
        return dh_TD, dweight_VD, *[None] * 7


def _losses(
    logits_RV: torch.Tensor, label_R: torch.Tensor, group: dist.ProcessGroup, ops: Ops
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The losses, and the largest logits and sums of the whole vocabulary: fp32 [R]."""
    divided = group.size() > 1
    most_R, sums_R = ops.softmax_sums(logits_RV)
    if divided:
        own_R = most_R.clone()
        dist.all_reduce(most_R, dist.ReduceOp.MAX, group)
        sums_R *= (own_R - most_R).exp_()
    width = logits_RV.shape[1]
    here_R = (label_R >= 0) & (label_R < width)
    of_label_R = logits_RV.gather(1, label_R.clamp(0, width - 1)[:, None])[:, 0] - most_R
    sums_2R = torch.stack([sums_R, of_label_R * here_R])
    if divided:
        dist.all_reduce(sums_2R, group=group)
    return sums_2R[0].log() - sums_2R[1], most_R, sums_2R[0]
