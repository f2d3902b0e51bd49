"""Megatron-Core's optimizer, its schedule, and its data parallelism, as a run uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from torch import Tensor

from moe_parallel.config import Config
from moe_parallel.telemetry.progress import Timers

PIECE = 1 << 18  # numbers; their fp32 copy stays in the processor's cache


def parallelize(config: Config, chunks: list[Any]) -> list[Any]:
    """The chunks, in bf16 if configured, in Megatron-Core's data-parallel wrapper."""
    megatron, parallel = get_model_config(chunks[0]), config.parallel
    if config.training.bf16:
        chunks = [Float16Module(megatron, chunk) for chunk in chunks]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        bucket_size=parallel.ddp_bucket_size,
    )
    # The communication of later virtual stages overlaps with the first one's computation anyway.
    wrapped = [
        DataParallel(megatron, ddp, chunk, disable_bucketing=stage > 0)
        for stage, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped


def build_optimizer(config: Config, chunks: list[Any], timers: Timers) -> Any:
    """Megatron-Core's optimizer of this rank's chunks; torch's Adam works in one pass."""
    ours = config.optimizer
    muon: dict[str, Any] = {}
    if ours.optimizer == "muon":
        from moe_parallel.platform.muon import orthogonalize_stacks

        orthogonalize_stacks()
        muon = {each.name: getattr(ours, each.name) for each in fields(ours)}
        muon = {name: value for name, value in muon.items() if name.startswith("muon_")}
        muon["muon_tp_mode"] = "duplicated"  # the update of the whole matrix, in every layout
    megatron = MegatronOptimizerConfig(
        optimizer=ours.optimizer,
        lr=ours.lr,
        min_lr=ours.min_lr,
        weight_decay=ours.weight_decay,
        adam_beta1=ours.adam_beta1,
        adam_beta2=ours.adam_beta2,
        adam_eps=ours.adam_eps,
        clip_grad=ours.clip_grad,
        bf16=config.training.bf16,
        params_dtype=torch.bfloat16 if config.training.bf16 else torch.float32,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
        timers=timers,
        **muon,
    )
    # The overrides exempt weights of one axis from weight decay, as --weight-decay says.
    optimizer = get_megatron_optimizer(megatron, chunks, get_standard_config_overrides(megatron))
    fuse_adam(optimizer)
    return optimizer


def build_scheduler(config: Config, optimizer: Any) -> OptimizerParamScheduler:
    """Megatron-Core's schedule, which counts iterations here."""
    ours = config.optimizer
    decay_iters = ours.lr_decay_iters or config.training.train_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=ours.lr,
        min_lr=ours.min_lr,
        lr_warmup_steps=ours.lr_warmup_iters,
        lr_decay_steps=decay_iters,
        lr_decay_style=ours.lr_decay_style,
        start_wd=ours.weight_decay,
        end_wd=ours.weight_decay,
        wd_incr_steps=decay_iters,
        wd_incr_style="constant",
        wsd_decay_steps=ours.lr_wsd_decay_iters or max(1, decay_iters // 10),
        lr_wsd_decay_style="cosine",
    )


class DataParallel(DistributedDataParallel):
    """Adds each weight's gradient to its main gradient in pieces, with the same bits.

    To add bf16 to fp32 on a CPU, torch makes an fp32 copy of all that it adds. For the experts of a
    layer these are tens of megabytes in each micro-batch.
    """

    def _make_backward_post_hook(self, param: Any) -> Callable[..., None]:
        then = super()._make_backward_post_hook(param)

        def hook(*unused: Any) -> None:
            if not _is_added_slowly(param):
                then(*unused)
                return
            add_in_pieces(param.main_grad, param.grad)
            param.grad_added_to_main_grad = True
            then(*unused)
            param.grad_added_to_main_grad = False

        return hook


def _is_added_slowly(param: Any) -> bool:
    """Whether Megatron-Core's hook would add a gradient of another type than the sum, on a CPU."""
    return (
        param.grad is not None
        and not param.grad_added_to_main_grad
        and not getattr(param, "zero_out_wgrad", False)
        and param.grad.dtype != param.main_grad.dtype
        and param.grad.device.type == "cpu"
    )


def add_in_pieces(total: Tensor, x: Tensor) -> None:
    """total += x; `total` is contiguous and has the shape of x."""
    pieces = zip(total.view(-1).split(PIECE), x.reshape(-1).split(PIECE), strict=True)
    for piece, of_x in pieces:
        piece += of_x


def optimizer_parts(optimizer: Any) -> list[Any]:
    """The optimizers that update weights: one of each kind, for dense and for expert weights if
    ranks divide them differently; or the optimizer itself."""
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


def gather_weights(chunks: Iterable[Any]) -> None:
    """Complete the weights of the model chunks on this rank. Collective.

    After an optimizer step a rank has updated only its share of the weights. With
    --overlap-param-gather the others arrive when the forward pass needs them, so code that reads
    the weights before then calls this function. Without the flag it does nothing.
    """
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.use_forward_hook:
            chunk.start_param_sync(force_sync=True)
