"""Plans of 1,024 ranks equal what one rank's real code allocates and sends.

torch's fake process group has any number of ranks in one process and moves no data. Models of full
size are built on the meta device.
"""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_parallel.config import Config, parse_command_line, validate
from moe_parallel.model import parameters
from moe_parallel.parallel import initialize_groups
from moe_parallel.plan.layout import layout_of
from moe_parallel.plan.memory import memory_of_stage
from moe_parallel.plan.messages import SMALL, messages_of_stage
from moe_parallel.plan.shape import shape_of
from moe_parallel.training import engine as engine_module
from tests.distributed import run_distributed
from tests.plan.counting import Messages
from tests.plan.running import (
    ALL_CHOSEN,
    AOE,
    UOE,
    VOCABULARY,
    Options,
    batches,
    config_of,
    engine_of,
    factors_stay_bf16,
)
from tests.plan.test_messages import ranks_of

RANKS = 1024
ADAM_BYTES = 12  # two moments and, with bf16, a master weight


def _become(rank: int) -> None:
    """Replace the real group of this process by a fake one of many ranks."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    new_group = dist.new_group
    # Megatron-Core makes some of its groups with gloo, which needs all ranks.
    dist.new_group = lambda *args, **named: new_group(*args, **(named | {"backend": "fake"}))


def _sent(rank: int, options: Options) -> tuple[dict[Any, int], dict[Any, int]]:
    """(by plan, sent): bytes of a step by kind and ranks."""
    _become(rank)
    config = config_of(options)
    engine = engine_of(config)
    with factors_stay_bf16(), Messages(echo=True) as messages:
        engine.step(batches(config))
    planned: Counter[Any] = Counter()
    layout, stage = layout_of(config, RANKS), engine.groups.pp.rank()
    for each in messages_of_stage(shape_of(config, VOCABULARY), layout, stage):
        planned[each.kind, ranks_of(each.group, rank)] += each.size * each.times
    sent: Counter[Any] = Counter()
    for (kind, ranks, size), times in messages.counted.items():
        if len(ranks) > 1 and (size > SMALL or kind != "all-reduce"):
            sent[kind, ranks] += size * times
    return dict(planned), dict(sent)


BF16 = {"bf16": True, "use_distributed_optimizer": True, "micro_batch_size": 4}


@pytest.mark.parametrize(
    ("rank", "options"),
    [
        (13, BF16 | {"expert_model_parallel_size": 4, "global_batch_size": 8192}),
        pytest.param(
            1023,
            BF16
            | AOE
            | ALL_CHOSEN
            | {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "expert_tensor_parallel_size": 1,
                "expert_model_parallel_size": 4,
                "aoe_gather_w_down": True,
                "global_batch_size": 2048,
            },
            marks=pytest.mark.full,
        ),
        pytest.param(
            13,
            BF16 | UOE | {"expert_model_parallel_size": 4, "global_batch_size": 8192},
            marks=pytest.mark.full,
        ),
    ],
    ids=["topk, ep 4", "aoe, tp 2, ep 4, gathered", "uoe, ep 4"],
)
def test_messages(rank: int, options: Options) -> None:
    planned, sent = run_distributed(1, _sent, rank, options)[0]
    assert planned == sent


def _allocated(rank: int, flags: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(by plan, by the real code): bytes of weights and gradients, which it allocates on the meta
    device, and of the optimizer state, of which it computes the rank's ranges of each weight."""
    _become(rank)
    config: Config = parse_command_line(flags)
    validate(config, RANKS)
    groups = initialize_groups(config.parallel, config.virtual_stages)
    model_parallel_cuda_manual_seed(1)
    assert config.data.vocab_size is not None
    with parameters._NamedDevicesAreMeta(), torch.device("meta"):
        chunks = parameters._without_storage(config, config.data.vocab_size, groups)
        wrapped = engine_module._parallelize(config, chunks)
    buffers = [b for chunk in wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    allocated = (
        sum(b.param_data.numel() * b.param_data.element_size() for b in buffers),
        sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
        sum(map(_updated, buffers)) * ADAM_BYTES,
    )
    layout, shape = layout_of(config, RANKS), shape_of(config, config.data.vocab_size)
    plan = memory_of_stage(shape, layout, groups.pp.rank(), groups.dp.rank())
    return (plan.weights, plan.gradients, plan.optimizer), allocated


def _updated(buffer: Any) -> int:
    """The number of weights of a buffer that the distributed optimizer of this rank updates."""
    ranges = (
        DistributedOptimizer._build_model_gbuf_range(buffer, bucket)["param_map"]
        for bucket in range(len(buffer.buckets))
    )
    return sum(each["param"].size for of_bucket in ranges for each in of_bucket.values())


@pytest.mark.parametrize(
    "name", ["aoe/aoe_4b", "aoe/moe_4b", pytest.param("erc/erc_3b", marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    "layout",
    [
        [],
        ["--aoe-gather-w-down", "--overlap-grad-reduce"],
        ["--pipeline-model-parallel-size", "4", "--num-layers-per-virtual-pipeline-stage", "1"],
    ],
    ids=["ep 8", "gathered, buckets", "pp 4, virtual"],
)
def test_a_model_of_4_billion_weights(name: str, layout: list[str]) -> None:
    layout = [flag for flag in layout if name == "aoe/aoe_4b" or "aoe" not in flag]
    flags = ["--config", f"examples/papers/{name}.yaml", *layout]
    flags += ["--global-batch-size", "4096"]  # a multiple of a micro-batch on every rank
    planned, allocated = run_distributed(1, _allocated, 777, flags)[0]
    assert planned == allocated
