"""What clipping does with all gradients, where Transformer Engine and Apex are absent: their norm,
and their product with a number.

For the norm Megatron-Core's own loop launches a kernel for each tensor and then waits for each, and
for clipping it copies each tensor twice. (A profile of 732 M parameters had 87 such waits in a
step.) torch's operators on lists of tensors take their place. The functions have the signatures of
Apex's `multi_tensor_l2norm` and `multi_tensor_scale`, which Megatron-Core calls. Only the tensors,
the size of a chunk and the scale are used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

TensorLists = list[list[torch.Tensor]]

ROW = 128  # elements whose squares are summed in fp32
#: Sums of squares that fp32 has room for: no square of importance was 0 or infinite.
IN_FP32 = (1e-20, 1e30)


def l2_norm_of_list(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, per_tensor: bool, *_: Any
) -> tuple[torch.Tensor, None]:
    """On a GPU: the L2 norm of all elements of the tensors as one vector, [1]; the host does not
    wait."""
    norms = torch._foreach_norm([tensor for tensors in tensor_lists for tensor in tensors])
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def l2_norm_by_rows(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, per_tensor: bool, *_: Any
) -> tuple[torch.Tensor, None]:
    """On a CPU: the L2 norm of all elements of the tensors as one vector: fp32 [1], with a relative
    error of 3e-7 at most.

    Squares are summed in fp32 over a row of 128 elements, and rows in fp64. The error is largest
    if all rows are equal, because they round alike. torch's own norm of an fp32 tensor on a CPU
    adds all squares in a few fp32 accumulators. Its error is 2e-5 at 1.6 million elements and 1e-3
    at 25 million, larger in a large tensor than in its parts, so layouts would clip differently.
    (On a GPU thousands of threads add a few elements each, so the error is small.)

    Args:
        chunk_size: the most elements that are converted to fp64 at a time, if fp32 has no room.
    """
    tensors = [tensor.reshape(-1) for tensors in tensor_lists for tensor in tensors]
    squares = _squares_by_rows(tensors)
    if not IN_FP32[0] < squares < IN_FP32[1]:
        squares = _squares_in_fp64(tensors, chunk_size)
    return squares.sqrt().float().reshape(1), None


def _squares_by_rows(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of all squares, fp64 []; 0 or infinite if fp32 has no room for those of a row."""
    norms, rests = [torch.zeros(0)], [torch.zeros(0)]
    for tensor in tensors:
        end = len(tensor) // ROW * ROW
        norms.append(
            torch.linalg.vector_norm(tensor[:end].view(-1, ROW), dim=1, dtype=torch.float32)
        )
        rests.append(tensor[end:])
    return torch.cat(norms + rests).double().square().sum()


def _squares_in_fp64(tensors: Iterable[torch.Tensor], chunk_size: int) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        for chunk in tensor.split(chunk_size):
            total += torch.linalg.vector_norm(chunk, dtype=torch.float64).square()
    return total


def scale_list(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, scale: float
) -> None:
    """Writes `scale` times each tensor of the first list to that of the second, which may be it."""
    sources, targets = tensor_lists
    if not targets:
        return
    if sources is not targets:
        torch._foreach_copy_(targets, sources)
    if scale != 1:
        torch._foreach_mul_(targets, scale)


def replace_gradient_loops() -> None:
    """Let Megatron-Core call these functions, unless one of the packages is there.

    A second call does nothing. The norm of a CPU host stays.
    """
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer

    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm_of_list
    for module in (clip_grads, optimizer):
        if module.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
            module.multi_tensor_scale_impl = scale_list
