"""Process groups, made by Megatron-Core's parallel_state; sums over them; random numbers by them.

Megatron-Core has functions for such sums too. Those of 0.16.1 and 0.19.2 lose the result if the
tensor is not contiguous, which a gradient may be, and overwrite their input if it is contiguous.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from moe_parallel.config import ParallelConfig

c10d: Any = dist.distributed_c10d  # its stubs leave out the options of gloo

# torch 2.13 and later have new names for them; 2.11 has the older ones.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


@dataclass(frozen=True)
class Groups:
    """This rank's groups, over which routing and dispatch communicate.

    Inside a layer that dispatches tokens, those of a micro-batch are split over `tp` and `cp`, with
    or without sequence parallelism. So every rank of `tp`, `cp` and `dp` routes its own tokens.
    Without sequence parallelism they are not split over `tp` where tp does not divide the sequence
    length of an evaluation.
    """

    tp: dist.ProcessGroup  # tensor parallel: one micro-batch, its tokens split
    cp: dist.ProcessGroup  # context parallel: one micro-batch, its sequences split
    tp_cp: dist.ProcessGroup  # the ranks of one micro-batch; tp varies fastest
    dp: dist.ProcessGroup  # data parallel: other micro-batches, same dense parameters
    pp: dist.ProcessGroup  # pipeline stages
    ep: dist.ProcessGroup  # ranks that share the experts
    etp: dist.ProcessGroup  # ranks that share each expert's matrices
    edp: dist.ProcessGroup  # ranks that hold the same expert shards
    tp_dp_cp: dist.ProcessGroup  # ranks that route tokens of the same layers: a pipeline stage
    etp_ep: dist.ProcessGroup  # ranks that together hold every expert once; etp varies fastest


@contextmanager
def share_gloo_device() -> Iterator[None]:
    """The gloo groups that are made inside use the device of the default group, if it is gloo's.

    torch gives each gloo group a device of its own: a thread that looks at the group's sockets a
    hundred times a second, even if nothing is sent. Megatron-Core makes 20 groups. Their threads
    took 3% of a core of an AMD EPYC (Zen 3) per rank. One device can serve any number of groups.

    torch.distributed must be initialized. `new_group` passes no options to gloo, so inside it finds
    another class under the name of gloo's.
    """
    gloo = c10d.ProcessGroupGloo
    cpu = torch.device("cpu")
    default: Any = dist.group.WORLD
    backend = default._get_backend(cpu) if cpu in default._device_types else None
    if not isinstance(backend, gloo):
        yield
        return
    devices = backend.options._devices

    class OnSharedDevice(dist.ProcessGroupGloo):
        def __init__(
            self,
            store: dist.Store,
            rank: int,
            size: int,
            timeout: timedelta,
            enable_reconfigure: bool = False,  # of torch 2.15, which passes it
        ) -> None:
            options = gloo._Options()
            options._timeout = timeout
            options._devices = devices
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OnSharedDevice
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = gloo


class OneProcess:
    """A stand-in for a process group of this process only, without torch.distributed."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def groups_of_one() -> Groups:
    """The groups of a process that holds all layers alone. Nothing is initialized."""
    alone = cast(dist.ProcessGroup, OneProcess())
    return Groups(**{field.name: alone for field in fields(Groups)})


def initialize_groups(config: ParallelConfig, virtual_stages: int | None = None) -> Groups:
    """Make Megatron-Core's groups; torch.distributed must be initialized.

    Args:
        config: the sizes of the groups.
        virtual_stages: the number of virtual pipeline stages per rank. None: the plain schedule.
    """
    from megatron.core import parallel_state

    with share_gloo_device():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_size,
            virtual_pipeline_model_parallel_size=virtual_stages,
            distributed_timeout_minutes=config.distributed_timeout_minutes,
        )
    return current_groups()


def current_groups() -> Groups:
    """The groups that Megatron-Core has made in this process."""
    from megatron.core import parallel_state

    return Groups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        tp_cp=parallel_state.get_tensor_and_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        ep=parallel_state.get_expert_model_parallel_group(),
        etp=parallel_state.get_expert_tensor_parallel_group(),
        edp=parallel_state.get_expert_data_parallel_group(),
        tp_dp_cp=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        etp_ep=parallel_state.get_expert_tensor_and_model_parallel_group(),
    )


def destroy_groups() -> None:
    """Undo `initialize_groups`, so that a process can make other groups. Collective.

    Megatron-Core drops its groups without destroying them, and each has its own threads. Those of
    gloo end with the last reference to their group, and models in reference cycles hold some.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.barrier()  # no rank may leave a group that another rank still uses
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def seed_ranks(seed: int, groups: Groups) -> None:
    """Seed the generators of torch and Megatron-Core for `uniform_like`."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # In steps of more than all that Megatron-Core adds to a seed, so that no two states are equal.
    seed += 10**6 * (groups.pp.rank() + groups.pp.size() * groups.dp.rank())
    torch.manual_seed(seed)
    # No layer draws from the state of experts, whose seed could be that of another state.
    model_parallel_cuda_manual_seed(seed, tp_rank=groups.tp_cp.rank(), ep_rank=0, etp_rank=0)


def uniform_like(x: torch.Tensor, groups: Groups, *, shared: bool) -> torch.Tensor:
    """Random numbers of [0, 1) in the shape of x, fp32: all that the layers of a run draw.

    They are independent on data-parallel ranks and on pipeline stages. On the ranks of tp and cp,
    which share a micro-batch, they are equal if `shared`, for a number per sequence, and otherwise
    independent, for a number per token. Their states are Megatron-Core's, which checkpoints keep
    and recomputation sets back. The default generator is not one of them: with sequence
    parallelism, Megatron-Core runs the layers in a state that differs over tp.

    (The coupling loss is of weights. Its noise is equal on all ranks, from a generator of its own.)
    """
    # A CUDA graph, for which every rank has a complete model, can draw from the default alone.
    if isinstance(groups.tp, OneProcess) or (shared and groups.tp_cp.size() == 1):
        return torch.rand_like(x, dtype=torch.float32)
    from megatron.core.tensor_parallel import random

    of_sequences = [random.get_data_parallel_rng_tracker_name()] if shared else []
    with random.get_cuda_rng_tracker().fork(*of_sequences):
        return torch.rand_like(x, dtype=torch.float32)


def sum_over(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of x over the ranks of a group. Each rank's x has the gradient of the sum."""
    return x if group.size() == 1 else _SumOver.apply(x, group)


def sum_gradient_over(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns x. Its gradient is the sum of the gradients on the ranks of a group.

    It is for a weight that every rank holds completely and uses on its own tokens.
    """
    return x if group.size() == 1 else _SumGradientOver.apply(x, group)


def gather_over(x: torch.Tensor, axis: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The x of all ranks, concatenated along an axis in the order of ranks.

    The gradient of a rank's x is the gradient of its part, summed over the ranks, in the dtype of
    x.
    """
    return x if group.size() == 1 else _GatherOver.apply(x, axis, group)


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _SumGradientOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradients[0], ctx.group), None


class _GatherOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.axis, ctx.group = axis, group
        parts = x.new_empty(group.size(), *x.shape)
        all_gather_single(parts.flatten(0, 1), x.contiguous(), group=group)
        return parts.movedim(0, axis).flatten(axis, axis + 1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        parts = gradients[0].unflatten(ctx.axis, (ctx.group.size(), -1)).movedim(ctx.axis, 0)
        total = parts.new_empty(parts.shape[1:])
        reduce_scatter_single(total, parts.flatten(0, 1).contiguous(), group=ctx.group)
        return total, None, None
