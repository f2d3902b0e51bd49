"""The norm of gradients on a CPU, which is used for clipping and is reported by runs."""

from typing import Any

import torch


def multi_tensor_l2_norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[list[torch.Tensor]],
    per_tensor: bool,
    *_: Any,
) -> tuple[torch.Tensor, None]:
    """The L2 norm of all elements of the tensors as one vector: fp32 [1], correct to its rounding.

    It has the signature of Apex's and Transformer Engine's `multi_tensor_l2norm`; `noop_flag` and
    `per_tensor` are for GPUs. Squares are summed in fp64. torch's own norm of an fp32 tensor on a
    CPU adds them in a few fp32 accumulators. Its error is 2e-5 at 1.6 million elements and 1e-3 at
    25 million, larger in a large tensor than in its parts, so layouts would clip differently. (On a
    GPU thousands of threads add a few elements each, so the error is small.)

    Args:
        chunk_size: the most elements that are converted to fp64 at a time.
    """
    squares = torch.zeros((), dtype=torch.float64)
    for tensor in (tensor for tensors in tensor_lists for tensor in tensors):
        for chunk in tensor.reshape(-1).split(chunk_size):
            squares += torch.linalg.vector_norm(chunk, dtype=torch.float64).square()
    return squares.sqrt().float().reshape(1), None
