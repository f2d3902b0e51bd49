"""Megatron-Core on a CPU host: it trains, and each adaptation is necessary."""

import functools
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_parallel.platform import cpu_host
from moe_parallel.platform.cpu_host import REPLACED, REWRITTEN, adapt, adapt_megatron_to_cpu
from moe_parallel.platform.megatron import installed_version
from tests.distributed import RankError, run_distributed
from tests.platform import scenarios

#: For each adaptation, an action that works with it and fails without it: (ranks, action).
NEEDED_FOR = {
    "torch.cuda.current_device": (1, scenarios.train),
    "torch.cuda.synchronize": (1, scenarios.time_a_section),
    "torch.cuda.current_stream": (1, scenarios.train),
    "torch.cuda.Stream": (1, scenarios.train),
    "torch.cuda.manual_seed": (2, scenarios.dropout_differs_between_tensor_parallel_ranks),
    "torch.cuda.get_rng_state": (2, scenarios.dropout_differs_between_tensor_parallel_ranks),
    "torch.Tensor.cuda": (2, scenarios.train_pipeline_with_tied_embeddings),
    "megatron.core.tensor_parallel.random._get_cuda_rng_state": (1, scenarios.recompute),
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": (
        2,
        scenarios.dropout_differs_between_tensor_parallel_ranks,
    ),
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": (
        2,
        scenarios.train_expert_parallel,
    ),
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": (1, scenarios.train),
    "megatron.core.tensor_parallel.CheckpointWithoutOutput": (1, scenarios.recompute_a_norm),
    "megatron.core.models.common.embeddings.rotary_pos_embedding.get_pos_emb_on_this_cp_rank": (
        2,
        scenarios.rotary_angles_of_a_share,
    ),
    "megatron.core.pipeline_parallel.schedules": (1, scenarios.train),
    "megatron.core.optimizer.optimizer": (1, scenarios.train),
    "megatron.core.optimizer.distrib_optimizer": (2, scenarios.train_with_distributed_optimizer),
    "megatron.core.optimizer.clip_grads": (1, scenarios.train),
    "megatron.core.optimizer.clip_grads.l2_norm_impl": (1, scenarios.train),
    "megatron.core.transformer.utils": (1, scenarios.train),
    "megatron.core.rerun_state_machine": (1, scenarios.repeat_a_step),
    "megatron.core.dist_checkpointing.exchange_utils": (2, scenarios.load_fully_parallel),
}
#: A name that is undefined without Transformer Engine, before 0.17.
UNDEFINED = "megatron.core.transformer.moe.moe_utils.te_general_gemm"
TARGETS = (*REPLACED, *REWRITTEN)
NEEDED = [each for each in TARGETS if each != UNDEFINED or installed_version() < "0.17"]


def test_evaluates_without_changing_the_model():
    run_distributed(1, scenarios.evaluate)


@pytest.mark.full
@pytest.mark.parametrize("target", NEEDED)
def test_each_adaptation_is_needed(target):
    world_size, scenario = NEEDED_FOR[target]
    _check_that_it_works(world_size, scenario)
    without = functools.partial(adapt_without, target)
    with pytest.raises(RankError, match="failed"):
        run_distributed(world_size, scenario, prepare=without)


@functools.cache
def _check_that_it_works(world_size, scenario):
    run_distributed(world_size, scenario)


def adapt_without(target):
    for each in TARGETS:
        if each != target:
            adapt(each)


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
    (before,) = run_distributed(1, _literals_left, prepare=_nothing)
    (after,) = run_distributed(1, _literals_left)
    assert "megatron.core.optimizer.clip_grads.clip_grad_by_total_norm_fp32" in before
    assert "megatron.core.optimizer.optimizer.FP32Optimizer.__init__" in before
    assert after == set()


def _nothing():
    pass


@pytest.mark.full
def test_megatron_may_be_imported_afterward():
    program = (
        "import moe_parallel.platform.cpu_host as host, torch.distributed as dist\n"
        "host.adapt_megatron_to_cpu()\n"
        "store = dist.HashStore()\n"
        "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "from tests.platform import scenarios\n"
        "scenarios.train()\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_refuses_a_host_with_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.current_device
    with pytest.raises(RuntimeError, match="CUDA is available"):
        adapt_megatron_to_cpu()
    assert torch.cuda.current_device is before
