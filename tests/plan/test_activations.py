"""The bytes kept for the backward pass equal those that autograd keeps, for each tensor."""

from collections import Counter
from itertools import chain
from unittest import mock

import pytest
import torch

from moe_parallel.config import Config
from moe_parallel.model.attention import _strip
from moe_parallel.model.forward import share_of
from moe_parallel.parallel import destroy_groups
from moe_parallel.plan.layout import layout_of
from moe_parallel.plan.memory import kept_by_chunk
from tests.distributed import run_distributed
from tests.plan.counting import Kept
from tests.plan.running import (
    ALL_CHOSEN,
    AOE,
    AOE_EXPERT_CHOICE,
    AOE_THRESHOLD,
    AOE_TOP_P,
    CONSTANT,
    DENSE,
    ERC,
    EXPERT_CHOICE,
    FREE,
    GATED,
    HASH,
    RELU,
    ROUTING_FREE,
    SHARED,
    THRESHOLD,
    TOP_P,
    TOP_P_FREE,
    UOE,
    Options,
    batches,
    config_of,
    engine_of,
    factors_stay_bf16,
    planned_shape,
)

#: Bytes of each tensor by plan, of each that is kept, and what is known of those.
Found = tuple[list[int], list[int], list[tuple[tuple[int, ...], str, int]]]


def _kept(world_size: int, cases: dict[str, Options]) -> dict[str, Found]:
    """By case: sizes by the plan, and sizes that autograd keeps after a forward pass."""
    found = {}
    for name, options in cases.items():
        config = config_of(options)
        engine = engine_of(config)
        (chunk,) = engine.chunks
        # On a CPU the strips of queries of a share have a mask, which all layers have in common.
        mask = _strip(config.training.seq_length, config_dtype(config))
        kept = Kept(chain(chunk.module.parameters(), chunk.module.buffers(), [mask]))
        batch = share_of(next(batches(config)), engine.groups.cp)
        for unused in ("position_ids", "positions", "counted"):
            batch.pop(unused)
        chunk.train()
        hooks = mock.patch("moe_parallel.layers.scoring_weight.saved_tensors_hooks", kept.within)
        with factors_stay_bf16(), hooks, kept.counting():
            losses = chunk(batch.pop("tokens"), None, None, **batch)
        sizes = kept.sizes()
        losses.sum().backward()
        planned = kept_by_chunk(
            planned_shape(config), layout_of(config, world_size), stage=0, chunk=0
        )
        found[name] = ([k.nbytes for k in planned], [size for *_, size in sizes], sizes)
        destroy_groups()
    return found


def config_dtype(config: Config) -> torch.dtype:
    return torch.bfloat16 if config.training.bf16 else torch.float32


def _compare(found: dict[str, Found]) -> None:
    """The plan has a tensor of each size that is kept, as often as it is kept."""
    wrong = {}
    for name, (planned, kept, sizes) in found.items():
        too_many, missing = Counter(planned) - Counter(kept), Counter(kept) - Counter(planned)
        if too_many or missing:
            of_size = [tensor for tensor in sizes if tensor[-1] in missing]
            wrong[name] = (dict(too_many), dict(missing), of_size)
    assert not wrong, wrong


PRECISIONS = {"fp32": {}, "bf16": {"bf16": True}}
of_each_precision = pytest.mark.parametrize(
    "precision", [pytest.param("fp32", marks=pytest.mark.full), "bf16"]
)


@of_each_precision
def test_on_one_rank(precision: str) -> None:
    cases = {
        "topk": {},
        "topk without a loss": {"moe_aux_loss_coeff": 0.0},
        "aoe": AOE | ALL_CHOSEN,
        "aoe, C of all kept": AOE | ALL_CHOSEN | {"aoe_recompute_scores": False},
        "aoe, C W_up kept": AOE | ALL_CHOSEN | {"aoe_recompute_gate": False},
        "aoe, selected": AOE | ALL_CHOSEN | {"aoe_gradient": "selected", "moe_aux_loss_coeff": 0.0},
        "dense": DENSE,
        "dense and MoE layers": {"moe_layer_freq": "[0]+[1]"},
    }
    cases = {name: PRECISIONS[precision] | options for name, options in cases.items()}
    _compare(run_distributed(1, _kept, 1, cases)[0])


@of_each_precision
def test_systems_on_one_rank(precision: str) -> None:
    cases = {
        "sigmoid": {"moe_router_score_function": "sigmoid"},
        "groups, bias, by sequence": {
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "seq_aux_loss",
        },
        "z-loss": {"moe_z_loss_coeff": 0.1},
        "large router": {"moe_router_hidden_size": 24},
        "W_g of two factors": {"moe_gate_low_rank_size": 16},
        "shared": SHARED,
        "shared, gated": GATED,
        "aoe, shared": AOE | ALL_CHOSEN | GATED,
        "aoe, softmax over all": AOE | ALL_CHOSEN | {"aoe_gate": "all"},
        "top_p": TOP_P,
        "aoe_top_p": AOE_TOP_P,
        "expert_choice": EXPERT_CHOICE,
        "expert_choice, softmax": EXPERT_CHOICE | {"moe_expert_choice_scores": "softmax"},
        "aoe_expert_choice": AOE_EXPERT_CHOICE,
    }
    cases = {name: PRECISIONS[precision] | options for name, options in cases.items()}
    _compare(run_distributed(1, _kept, 1, cases)[0])


@of_each_precision
def test_newer_systems_on_one_rank(precision: str) -> None:
    cases = {
        "relu": RELU,
        "threshold": THRESHOLD,
        "aoe_threshold": AOE_THRESHOLD,
        "aoe_threshold, selected": AOE_THRESHOLD
        | {"aoe_threshold_gate": "sigmoid", "aoe_gradient": "selected"},
        "routing_free": ROUTING_FREE,
        "routing_free, softmax": ROUTING_FREE | {"routing_free_gate": "softmax"},
        "uoe": UOE,
        "uoe, silu": UOE | {"uoe_norm_of": "silu", "moe_aux_loss_coeff": 0.0},
        "uoe, gate of W_g, gated": UOE | {"uoe_norm_of": "gate", "uoe_gate_routing": True},
        "hash": HASH,
        "hash, one expert, recomputed": HASH
        | SELECTIVE
        | {"recompute_modules": "moe", "moe_router_topk": 1},
        "free": FREE,
        "constant": CONSTANT,
        "zero experts without a weight": FREE | {"moe_zero_expert_gate": "renormalize"},
        "aoe, free": AOE | FREE,
        "aoe, constant, selected": AOE
        | CONSTANT
        | {"aoe_gradient": "selected", "moe_aux_loss_coeff": 0.0},
        "top_p, free": TOP_P_FREE,
        "top_p, renormalized": TOP_P | {"moe_top_p_renormalize": True},
        "one expert": {"moe_router_topk": 1},
        "coupling loss": ERC,
    }
    cases = {name: PRECISIONS[precision] | options for name, options in cases.items()}
    _compare(run_distributed(1, _kept, 1, cases)[0])


EP, TP = {"expert_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}
SP = TP | {"sequence_parallel": True}


@pytest.mark.full
@of_each_precision
def test_on_two_ranks(precision: str) -> None:
    cases = {
        "topk, ep": EP,
        "topk, sp": SP,
        "topk, tp": TP,
        "topk, tp and ep": SP | EP | {"expert_tensor_parallel_size": 1},
        "aoe, ep": AOE | ALL_CHOSEN | EP,
        "aoe, ep, C sent": AOE | ALL_CHOSEN | EP | {"aoe_send_activations": True},
        "aoe, ep, gathered": AOE | ALL_CHOSEN | EP | {"aoe_gather_w_down": True},
        "aoe, ep, selected, C sent": AOE
        | ALL_CHOSEN
        | EP
        | {"aoe_send_activations": True, "aoe_gradient": "selected", "moe_aux_loss_coeff": 0.0},
        "aoe, sp": AOE | ALL_CHOSEN | SP,
        "dense, tp": DENSE | TP,
        "dense, sp": DENSE | SP,
    }
    cases = {name: PRECISIONS[precision] | options for name, options in cases.items()}
    for of_rank in run_distributed(2, _kept, 2, cases):
        _compare(of_rank)


@pytest.mark.full
@of_each_precision
def test_systems_on_two_ranks(precision: str) -> None:
    cases = {
        "shared, gated, ep": GATED | EP,
        "shared, gated, sp": GATED | SP,
        "shared, gated, tp": GATED | TP,
        "aoe, shared, gated, sp": AOE | ALL_CHOSEN | GATED | SP,
        "sigmoid, sp": SP | {"moe_router_score_function": "sigmoid"},
        "large router, tp": TP | {"moe_router_hidden_size": 24},
        "W_g of two factors, ep": EP | {"moe_gate_low_rank_size": 16},
        "top_p, ep": TOP_P | EP,
        "aoe_top_p, ep": AOE_TOP_P | EP,
        "expert_choice, ep": EXPERT_CHOICE | EP,
        "aoe_expert_choice, ep": AOE_EXPERT_CHOICE | EP,
    }
    cases = {name: PRECISIONS[precision] | options for name, options in cases.items()}
    for of_rank in run_distributed(2, _kept, 2, cases):
        _compare(of_rank)


@pytest.mark.full
@of_each_precision
def test_newer_systems_on_two_ranks(precision: str) -> None:
    cases = {
        "relu, ep": RELU | EP,
        "relu, sp": RELU | SP,
        "threshold, ep": THRESHOLD | EP,
        "aoe_threshold, sp": AOE_THRESHOLD | SP,
        "routing_free, ep": ROUTING_FREE | EP,
        "routing_free, tp": ROUTING_FREE | TP,
        "uoe, ep": UOE | EP,
        "uoe, shared, gated, sp": UOE | GATED | SP,
        "hash, ep": HASH | EP,
        "hash, sp, recomputed": HASH | SP | SELECTIVE | {"recompute_modules": "moe"},
        "free, ep": FREE | EP,
        "constant, shared, sp": CONSTANT | SHARED | SP,
        "constant, tp": CONSTANT | TP,
        "aoe, free, ep": AOE | FREE | EP,
        "coupling loss, ep": ERC | EP,
        "coupling loss, sp": ERC | SP,
    }
    cases = {name: PRECISIONS[precision] | options for name, options in cases.items()}
    for of_rank in run_distributed(2, _kept, 2, cases):
        _compare(of_rank)


CP = {"context_parallel_size": 2}


@of_each_precision
def test_a_share_of_the_sequences(precision: str) -> None:
    cases = {
        "topk, cp": CP,
        "aoe, cp and ep": AOE | ALL_CHOSEN | CP | EP,
        "dense, cp, attention recomputed": DENSE | CP | SELECTIVE,
        "cp, layers recomputed": CP | {"recompute_granularity": "full"},
    }
    cases = {name: PRECISIONS[precision] | options for name, options in cases.items()}
    first, last = run_distributed(2, _kept, 2, cases)
    _compare(first)
    for name, (planned, kept, _) in last.items():
        # Its two chunks are neighbors: their attention is one, and its output is not copied.
        t, layers, repeated = 4 * 32 // 2, 2, "recomputed" in name
        copied = 0 if repeated else layers * t * 64 * (2 if precision == "bf16" else 4)
        assert sum(planned) - sum(kept) == copied, name


SELECTIVE = {"recompute_granularity": "selective"}
NORMS = SELECTIVE | {"recompute_modules": "layernorm"}
LAYERS = SELECTIVE | {"recompute_modules": "mlp moe", "moe_layer_freq": "[0]+[1]"}


@of_each_precision
def test_modules_that_are_computed_again(precision: str) -> None:
    cases = {
        "attention": SELECTIVE,
        "norms": NORMS,
        "norms, aoe": NORMS | AOE | ALL_CHOSEN,
        "norms, dense": NORMS | DENSE,
        "layers": LAYERS,
        "aoe": AOE | ALL_CHOSEN | SELECTIVE | {"recompute_modules": "moe"},
        "shared": GATED | SELECTIVE | {"recompute_modules": "shared_experts"},
        "all": LAYERS | {"recompute_modules": "core_attn layernorm mlp moe"},
        "shared experts": GATED | SELECTIVE | {"recompute_modules": "shared_experts"},
        "aoe, shared experts": AOE
        | ALL_CHOSEN
        | GATED
        | SELECTIVE
        | {"recompute_modules": "shared_experts"},
    }
    cases = {name: PRECISIONS[precision] | options for name, options in cases.items()}
    _compare(run_distributed(1, _kept, 1, cases)[0])


@pytest.mark.full
def test_on_four_ranks() -> None:
    both = SP | EP | {"bf16": True}  # each expert on two ranks, and each two experts on two
    cases = {"topk": both, "aoe": AOE | ALL_CHOSEN | both, "aoe, tp": AOE | ALL_CHOSEN | TP | EP}
    for of_rank in run_distributed(4, _kept, 4, cases):
        _compare(of_rank)


def test_with_recomputation_only_inputs_are_kept() -> None:
    cases = {
        "topk": {"recompute_granularity": "full"},
        "aoe": AOE | ALL_CHOSEN | {"recompute_granularity": "full", "bf16": True},
    }
    _compare(run_distributed(1, _kept, 1, cases)[0])
