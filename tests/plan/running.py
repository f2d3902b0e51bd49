"""Build and run a small model on the ranks of a test, and compare it with its plan."""

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from moe_parallel.config import Config, FixedChoices, make_config, selection_of, validate
from moe_parallel.layers import DispatchedLayer
from moe_parallel.parallel import initialize_groups
from moe_parallel.systems.routing_free.rule import RoutingFreeLayer
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
AOE_TOP_P = AOE | TOP_P | {"expert_selection": "aoe_top_p", "moe_top_p": 0.65}
AOE_EXPERT_CHOICE = AOE | {"expert_selection": "aoe_expert_choice"}
UOE = {"expert_selection": "uoe", "uoe_routing_neurons": 16}
CORM = {"expert_selection": "corm", "corm_key_size": 16}
HASH = {"expert_selection": "hash", "moe_router_topk": 4}
RELU = {"expert_selection": "relu"}
THRESHOLD = {"expert_selection": "threshold"}
AOE_THRESHOLD = AOE | {"expert_selection": "aoe_threshold"}
ROUTING_FREE = AOE | {"expert_selection": "routing_free"}
#: Of three choices, one falls on a free expert.
TO_FREE = {
    "moe_router_topk": 3,
    "moe_router_force_load_balancing": False,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update": "error",
    "moe_ffn_experts_per_token": 2.0,
}
FREE = TO_FREE | {"moe_copy_experts": 1, "moe_zero_experts": 2}
CONSTANT = TO_FREE | {"moe_copy_experts": 1, "moe_constant_experts": 2}
ERC = {"moe_erc_loss_coeff": 1.0, "moe_router_pre_softmax": True}
#: Experts of a token: 4 probabilities are nearly equal at first, and p is 0.4 and 0.6.
MEAN_CHOICES = {"top_p": 2.0, "aoe_top_p": 3.0}
SEGMENTS = {"lory_segment_length": 8}
LORY = {"expert_selection": "lory"} | SEGMENTS
LORY_PREFIX = {"expert_selection": "lory_prefix"} | SEGMENTS
SEGMENT_EXPERT_CHOICE = {"expert_selection": "segment_expert_choice"} | SEGMENTS
SMEAR = {"expert_selection": "smear", "smear_sees_the_future": True}
SHARED = {"moe_shared_expert_intermediate_size": 48}
GATED = SHARED | {"moe_shared_expert_gate": True}


def config_of(options: Options) -> Config:
    whole = SIZES | options
    if not issubclass(selection_of(whole.get("expert_selection", "topk")), FixedChoices):
        for name in {"moe_router_topk", "moe_router_force_load_balancing"} - set(options):
            del whole[name]
    return make_config(whole)


def mean_of(config: Config) -> float | None:
    """The mean number of experts of a token here, where the configuration does not say it."""
    selection = config.selection
    if config.moe.num_experts is None or selection.mean_choices is not None:
        return None
    return 4.0 if selection.free_experts else MEAN_CHOICES[selection.system]


def visits_of(config: Config, destinations: int) -> int:
    """Destinations that divide the experts evenly, and that each token has an expert of here."""
    selection, n = config.selection, config.num_experts
    chosen: Sequence[int] = range(round(selection.mean_choices or mean_of(config) or 0))
    in_turn = selection.forced_routing == "in turn"
    if len(chosen) == len(TAKEN) and not in_turn:
        chosen = TAKEN  # also where a load is forced to be balanced
    return len({expert * destinations // n for expert in chosen})


def engine_of(config: Config) -> Engine:
    validate(config, dist.get_world_size())
    groups = initialize_groups(config.parallel, config.virtual_stages)
    model_parallel_cuda_manual_seed(1)
    engine = Engine(config, VOCABULARY, groups)
    for layer in engine._expert_layers:
        if isinstance(layer, DispatchedLayer):
            _take(layer, config)
    if config.selection.system == "relu":
        _make_loud(engine)
    return engine


#: The experts of every token where a test decides: one of each of two ranks.
TAKEN = (0, 2)


@torch.no_grad()
def _take(layer: DispatchedLayer, config: Config) -> None:
    """Lets every token take the experts TAKEN, and with free experts the last one of these."""
    if isinstance(layer, RoutingFreeLayer):
        layer.b_E.copy_(-_far(layer.num_experts, TAKEN))
    elif layer.cutoffs() is not None or (layer.free is not None and layer.bias is not None):
        last = [] if layer.free is None else [layer.num_scores - 1]
        assert layer.bias is not None
        layer.bias.bias_E.copy_(_far(layer.num_scores, [*TAKEN, *last]))
    elif config.selection.system == "relu":
        weight = layer.w_router_ED
        weight.zero_()
        weight[:, 0] = _far(layer.num_experts, TAKEN) / 20


def _far(number: int, chosen: Sequence[int]) -> torch.Tensor:
    """10 for the chosen ones, -10 for the others."""
    return torch.tensor([10.0 if each in chosen else -10.0 for each in range(number)])


@torch.no_grad()
def _make_loud(engine: Engine) -> None:
    """Makes the first number of every token large, so that a router may go by it alone."""
    for chunk in engine.chunks:
        for name, weight in chunk.named_parameters():
            if "word_embeddings" in name:
                weight[:, 0] = 10.0


def batches(config: Config) -> Iterator[dict[str, torch.Tensor]]:
    sequences, length = config.training.micro_batch_size, config.training.seq_length
    parallel = config.parallel
    share = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    generator = torch.Generator().manual_seed(dist.get_rank() // share)  # they have one text
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
