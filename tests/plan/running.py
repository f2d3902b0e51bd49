"""Build and run a small model on the ranks of a test, and compare it with its plan."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from moe_parallel.config import Config, make_config, validate
from moe_parallel.parallel import initialize_groups
from moe_parallel.plan.shape import Shape, shape_of
from moe_parallel.training.engine import Engine

VOCABULARY = 100

#: 32 rows of each expert on a rank if loads are balanced: with a multiple of 16, no product in bf16
#: on a CPU has spare rows.
SIZES = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 160,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_router_force_load_balancing": True,
    "seq_length": 32,
    "micro_batch_size": 4,
    "global_batch_size": 16,
    "make_vocab_size_divisible_by": 16,
}
AOE = {"expert_selection": "aoe", "aoe_low_rank_size": 16, "aoe_wide_size": 96}
#: All experts are chosen, so that loads are balanced by AoE's own path.
ALL_CHOSEN = {"moe_router_topk": 4, "moe_router_force_load_balancing": False}
DENSE = {"num_experts": None, "moe_router_topk": 2, "moe_router_force_load_balancing": False}

Options = dict[str, Any]


#: Systems with flags of their own in place of K.
TOP_P = {"expert_selection": "top_p", "moe_router_force_routing": "balanced"}
EXPERT_CHOICE = {"expert_selection": "expert_choice"}
AOE_TOP_P = AOE | TOP_P | {"expert_selection": "aoe_top_p"}
AOE_EXPERT_CHOICE = AOE | {"expert_selection": "aoe_expert_choice"}
#: Experts of a token: 4 probabilities are nearly equal at first, and p is 0.4 and 0.6.
MEAN_CHOICES = {"top_p": 2.0, "aoe_top_p": 3.0}
SHARED = {"moe_shared_expert_intermediate_size": 48}
GATED = SHARED | {"moe_shared_expert_gate": True}


def config_of(options: Options) -> Config:
    whole = SIZES | options
    if whole.get("expert_selection", "topk") not in ("topk", "aoe"):
        del whole["moe_router_topk"], whole["moe_router_force_load_balancing"]
    return make_config(whole)


def planned_shape(config: Config) -> Shape:
    return shape_of(config, VOCABULARY, MEAN_CHOICES.get(config.selection.system))


def engine_of(config: Config) -> Engine:
    validate(config, dist.get_world_size())
    groups = initialize_groups(config.parallel, config.virtual_stages)
    model_parallel_cuda_manual_seed(1)
    return Engine(config, VOCABULARY, groups)


def batches(config: Config) -> Iterator[dict[str, torch.Tensor]]:
    sequences, length = config.training.micro_batch_size, config.training.seq_length
    generator = torch.Generator().manual_seed(dist.get_rank())
    while True:
        text = torch.randint(VOCABULARY, (sequences, length + 1), generator=generator)
        yield {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "position_ids": torch.arange(length).expand(sequences, -1),
            "loss_mask": torch.ones(sequences, length),
        }


def factors_stay_bf16() -> Any:
    """As on a GPU: a CPU without instructions for bf16 would keep copies in fp32."""
    return mock.patch("moe_parallel.platform.device.multiplies_bf16", lambda x: True)
