"""The parts of an optimizer of Megatron-Core, and the kernel of torch's Adam."""

from __future__ import annotations

from typing import Any

import torch


def optimizer_parts(optimizer: Any) -> list[Any]:
    """The optimizers that update weights: one for dense and one for expert weights if ranks divide
    them differently, and otherwise the optimizer itself."""
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return parts


def fuse_adam(optimizer: Any) -> None:
    """Let torch's Adam update all weights in one pass, on a CPU and on a GPU.

    Megatron-Core takes torch's Adam if neither Transformer Engine nor apex, whose Adam is one pass
    already, is installed.
    """
    for part in optimizer_parts(optimizer):
        if isinstance(part.optimizer, torch.optim.AdamW):
            part.optimizer.register_step_pre_hook(_in_one_pass)


def _in_one_pass(adam: torch.optim.Optimizer, *_: Any) -> None:
    """Read and write the weights and moments once, instead of ten times.

    The choice is set before each step, because a loaded state brings that of its run. The kernel
    reads the number of steps where the weights are; a loaded state has it on the CPU.
    """
    for group in adam.param_groups:
        group["fused"] = True
    for weight, state in adam.state.items():
        if "step" in state:
            state["step"] = state["step"].to(weight.device, non_blocking=True)
