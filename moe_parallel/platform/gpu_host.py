"""Replaces the loops over gradients that Megatron-Core runs where Transformer Engine and Apex are
absent, by torch's operators on lists of tensors.

For the norm of the gradients Megatron-Core's loop launches a kernel for each tensor and then waits
for each, and for clipping it copies each tensor. (A profile of 732 M parameters had 87 such waits
in a step.) If one of the packages is there, its kernels serve and nothing is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads, optimizer

TensorLists = list[list[torch.Tensor]]


def adapt_megatron_to_gpu() -> None:
    """Make the replacements; a second call does nothing."""
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm_of_list
    for module in (clip_grads, optimizer):
        if module.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
            module.multi_tensor_scale_impl = scale_list


def l2_norm_of_list(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, per_tensor: bool, *_: Any
) -> tuple[torch.Tensor, None]:
    """The L2 norm of all elements of the tensors as one vector, [1]; the host does not wait.

    It has the signature of Apex's `multi_tensor_l2norm`; only the tensors are used.
    """
    norms = torch._foreach_norm([tensor for tensors in tensor_lists for tensor in tensors])
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def scale_list(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, scale: float
) -> None:
    """Writes `scale` times each tensor of the first list to that of the second, which may be it.

    It has the signature of Apex's `multi_tensor_scale`; only the tensors and the scale are used.
    """
    sources, targets = tensor_lists
    if not targets:
        return
    if sources is not targets:
        torch._foreach_copy_(targets, sources)
    if scale != 1:
        torch._foreach_mul_(targets, scale)
