"""Megatron-Core on a CPU host: a run needs each adaptation, and random states are forked."""

import functools
import importlib

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from torch import distributed as dist

from moe_parallel.platform import cpu_host
from moe_parallel.platform.cpu_host import REPLACED, REWRITTEN, adapt, adapt_megatron_to_cpu
from tests.distributed import RankError, run_distributed
from tests.training.tiny_run import Layout, TinyRun

CORE = "megatron.core"
NORMS = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
#: Small runs, and the adaptations that each needs. The others are for Megatron-Core's own layer of
#: experts, with which benchmarks compare, for its other versions, or keep numbers right.
RUNS = {
    "plain": (
        (Layout(), {}),
        "torch.cuda.current_device",
        "torch.cuda.get_rng_state",
        f"{CORE}.tensor_parallel.random._get_cuda_rng_state",
        f"{CORE}.pipeline_parallel.schedules",
        f"{CORE}.optimizer.optimizer",
        f"{CORE}.optimizer.clip_grads",
    ),
    "pipeline": ((Layout(2, pp=2), {}), "torch.Tensor.cuda"),
    "context parallel": (
        (Layout(2, cp=2), {}),
        f"{CORE}.models.common.embeddings.rotary_pos_embedding.get_pos_emb_on_this_cp_rank",
    ),
    "distributed optimizer in bf16": (
        (Layout(2, distributed=True), {"bf16": True}),
        f"{CORE}.optimizer.distrib_optimizer",
    ),
    "norms recomputed": (
        (Layout(), NORMS), f"{CORE}.tensor_parallel.CheckpointWithoutOutput",
    ),
    "Megatron-Core's attention": (
        (Layout(), {"attention_backend": "local"}), f"{CORE}.transformer.utils",
    ),
}  # fmt: skip


def _train(layout, options, path):
    run = TinyRun(layout, path, options=options)
    run.steps(2)
    run.close()


def _adapt_without(target):
    for each in (*REPLACED, *REWRITTEN):
        if each != target:
            adapt(each)


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_a_run_needs_its_adaptations(tmp_path, name):
    (layout, options), *targets = RUNS[name]
    run_distributed(layout.world, _train, layout, options, tmp_path)
    for target in targets:
        without = functools.partial(_adapt_without, target)
        with pytest.raises(RankError, match="failed"):
            run_distributed(layout.world, _train, layout, options, tmp_path, prepare=without)


def _draws() -> tuple[torch.Tensor, torch.Tensor]:
    """What a tensor-parallel rank draws outside and inside of forks."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_cuda_manual_seed(3)
    outside = [torch.rand(8)]
    with get_cuda_rng_tracker().fork():
        inside = [torch.rand(8)]
    outside.append(torch.rand(8))
    with get_cuda_rng_tracker().fork():
        inside.append(torch.rand(8))
    model_parallel_cuda_manual_seed(3)
    assert torch.equal(torch.cat(outside), torch.rand(16)), "a fork moved the default state"
    with get_cuda_rng_tracker().fork():
        assert torch.equal(torch.cat(inside), torch.rand(16)), "a fork did not go on where it was"
    return torch.cat(outside), torch.cat(inside)


def test_ranks_draw_different_numbers_inside_a_fork_and_equal_ones_outside():
    (outside_0, inside_0), (outside_1, inside_1) = run_distributed(2, _draws)
    assert torch.equal(outside_0, outside_1)
    assert not torch.equal(inside_0, inside_1)


def _literals_left():
    functions = [
        function
        for module in REWRITTEN
        for function in cpu_host.functions_of(importlib.import_module(module))
    ]
    return {
        f"{function.__module__}.{function.__qualname__}"
        for function in functions
        if cpu_host.literals_in(function.__code__)
    }


def test_literals_are_found_and_none_is_left():
    (before,) = run_distributed(1, _literals_left, prepare=dist.is_available)
    (after,) = run_distributed(1, _literals_left)
    assert "megatron.core.optimizer.clip_grads.clip_grad_by_total_norm_fp32" in before
    assert "megatron.core.optimizer.optimizer.FP32Optimizer.__init__" in before
    assert after == set()


def test_refuses_a_host_with_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.current_device
    with pytest.raises(RuntimeError, match="CUDA is available"):
        adapt_megatron_to_cpu()
    assert torch.cuda.current_device is before
