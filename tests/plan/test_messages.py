"""Bytes of every kind of message by plan equal those that a rank gives to torch.distributed."""

from collections import Counter

import pytest
import torch.distributed as dist

from moe_parallel.parallel import destroy_groups
from moe_parallel.plan.layout import Group, layout_of
from moe_parallel.plan.messages import SMALL, Collective, Wire, messages_of_stage, wire_of
from tests.distributed import run_distributed
from tests.plan.counting import Messages
from tests.plan.running import (
    ALL_CHOSEN,
    AOE,
    AOE_EXPERT_CHOICE,
    AOE_THRESHOLD,
    CONSTANT,
    DENSE,
    ERC,
    EXPERT_CHOICE,
    FREE,
    GATED,
    HASH,
    RELU,
    ROUTING_FREE,
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

Totals = dict[tuple[str, tuple[int, ...]], int]  # bytes by kind and ranks


def ranks_of(group: Group, rank: int) -> tuple[int, ...]:
    first = rank - rank // group.stride % group.size * group.stride
    return tuple(range(first, first + group.size * group.stride, group.stride))


def _sent(world_size: int, cases: dict[str, Options]) -> dict[str, tuple[Totals, Totals]]:
    """By case: (by plan, sent in a step) on this rank."""
    found = {}
    for name, options in cases.items():
        config = config_of(options)
        engine = engine_of(config)
        with factors_stay_bf16(), Messages() as messages:
            engine.step(batches(config))
        layout = layout_of(config, world_size)
        planned: Counter[tuple[str, tuple[int, ...]]] = Counter()
        stage = engine.groups.pp.rank()
        for each in messages_of_stage(planned_shape(config), layout, stage):
            ranks = ranks_of(each.group, dist.get_rank())
            planned[each.kind, ranks] += each.size * each.times
        sent: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for (kind, ranks, size), times in messages.counted.items():
            if len(ranks) > 1 and (size > SMALL or kind != "all-reduce"):
                sent[kind, ranks] += size * times
        found[name] = (dict(planned), dict(sent))
        destroy_groups()
    return found


def _compare(found: dict[str, tuple[Totals, Totals]]) -> None:
    wrong = {
        name: sorted(set(planned.items()) ^ set(sent.items()))
        for name, (planned, sent) in found.items()
        if planned != sent
    }
    assert not wrong, wrong


EP, TP = {"expert_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}
SP, PP = TP | {"sequence_parallel": True}, {"pipeline_model_parallel_size": 2}
VIRTUAL = PP | {"num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1}
BF16, SHARDED = {"bf16": True}, {"use_distributed_optimizer": True}
OVERLAP = SHARDED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
FULL = {"recompute_granularity": "full"}
AOE_ALL = AOE | ALL_CHOSEN
GATHER = {"aoe_gather_w_down": True}

CP = {"context_parallel_size": 2}
SELECTIVE = {"recompute_granularity": "selective"}

QUICK = {
    "aoe, cp and ep, attention recomputed": AOE_ALL | CP | EP | BF16 | SHARDED | SELECTIVE,
    "dp, buckets": BF16 | OVERLAP | {"ddp_bucket_size": 20_000},
    "ep": EP | BF16 | SHARDED,
    "aoe, ep, C sent": AOE_ALL | EP | BF16 | {"aoe_send_activations": True},
    "aoe, ep, gathered, recomputed": AOE_ALL | EP | BF16 | GATHER | FULL,
    "sp": SP | BF16 | SHARDED,
    "aoe, tp": AOE_ALL | TP | BF16,
    "dense, sp": DENSE | SP,
    "pp, virtual": VIRTUAL | BF16 | SHARDED,
}
SYSTEMS = {
    "shared, gated, sp": GATED | SP | BF16 | SHARDED,
    "shared, gated, tp": GATED | TP | BF16,
    "by sequence, sp": SP | BF16 | {"moe_router_load_balancing_type": "seq_aux_loss"},
    "z-loss, large router, tp": TP | {"moe_z_loss_coeff": 0.1, "moe_router_hidden_size": 24},
    "W_g of two factors, sp": SP | BF16 | {"moe_gate_low_rank_size": 16},
    "W_g of two factors, tp": TP | BF16 | {"moe_gate_low_rank_size": 16},
    "top_p, ep": TOP_P | EP | BF16,
    "aoe_expert_choice, ep": AOE_EXPERT_CHOICE | EP | BF16,
    "expert_choice, ep": EXPERT_CHOICE | EP | BF16 | SHARDED,
}
NEWER_QUICK = {
    "threshold, sp": THRESHOLD | SP | BF16,
    "routing_free, ep": ROUTING_FREE | EP | BF16 | SHARDED,
    "uoe, tp": UOE | TP | BF16,
    "constant, ep": CONSTANT | EP | BF16,
    "coupling loss, ep": ERC | EP | BF16,
}
NEWER = {
    "relu, ep": RELU | EP | BF16 | SHARDED,
    "relu, tp": RELU | TP | BF16,
    "threshold, ep, by sign": THRESHOLD | EP | BF16 | {"moe_threshold_update": "sign"},
    "threshold, cp": THRESHOLD | CP | BF16,
    "aoe_threshold, tp": AOE_THRESHOLD | TP | BF16,
    "aoe_threshold, ep, gathered, recomputed": AOE_THRESHOLD | EP | BF16 | GATHER | FULL,
    "routing_free, tp": ROUTING_FREE | TP | BF16,
    "routing_free, sp": ROUTING_FREE | SP | BF16,
    "uoe, sp": UOE | SP | BF16 | SHARDED,
    "uoe, ep, layers recomputed": UOE | EP | BF16 | SELECTIVE | {"recompute_modules": "moe"},
    "hash, pp": HASH | PP | BF16 | SHARDED,
    "hash, ep": HASH | EP | BF16,
    "free, sp": FREE | SP | BF16,
    "constant, tp": CONSTANT | TP | BF16,
    "aoe, constant, tp": AOE | CONSTANT | TP | BF16,
    "top_p, free, ep": TOP_P_FREE | EP | BF16,
    "coupling loss, tp": ERC | TP | BF16,
    "coupling loss, sp": ERC | SP | BF16 | SHARDED,
    "bias by quantiles, cp": CP
    | BF16
    | {"moe_router_enable_expert_bias": True, "moe_router_bias_update": "quantile"},
}
MORE = {
    "cp": CP | BF16,
    "cp, recomputed": CP | BF16 | FULL,
    "ep, layers recomputed": EP | BF16 | SELECTIVE | {"recompute_modules": "moe"},
    "sp, dense recomputed": DENSE | SP | SELECTIVE | {"recompute_modules": "mlp layernorm"},
    "aoe, ep, gathered, layers recomputed": AOE_ALL
    | EP
    | BF16
    | GATHER
    | SELECTIVE
    | {"recompute_modules": "moe"},
    "dp": BF16,
    "dp, sharded": BF16 | SHARDED,
    "ep, overlapped": EP | BF16 | OVERLAP,
    "ep, recomputed": EP | BF16 | FULL,
    "aoe, ep": AOE_ALL | EP | BF16,
    "aoe, ep, gathered": AOE_ALL | EP | BF16 | GATHER,
    "sp, recomputed": SP | BF16 | FULL,
    "tp": TP | BF16,
    "aoe, sp": AOE_ALL | SP | BF16,
    "aoe, etp, gathered": AOE_ALL | SP | BF16 | GATHER,
    "aoe, etp, gathered, C sent": AOE_ALL | SP | BF16 | GATHER | {"aoe_send_activations": True},
    "dense, tp": DENSE | TP | {"loss_chunk_size": 50},
    "pp": PP | BF16 | SHARDED,
    "pp, untied": PP | {"untie_embeddings_and_output_weights": True},
}


@pytest.mark.parametrize(
    "cases",
    [
        QUICK,
        pytest.param(NEWER_QUICK | NEWER, marks=pytest.mark.full),
        pytest.param(SYSTEMS, marks=pytest.mark.full),
        pytest.param(MORE, marks=pytest.mark.full),
    ],
    ids=["quick", "newer", "systems", "more"],
)
def test_on_two_ranks(cases: dict[str, Options]) -> None:
    for of_rank in run_distributed(2, _sent, 2, cases):
        _compare(of_rank)


@pytest.mark.full
def test_on_four_ranks() -> None:
    cases = {
        "ep and edp": EP | BF16 | SHARDED,
        "tp and cp": SP | CP | EP | BF16 | SHARDED,
        "tp and cp, not split between": TP | CP | BF16,
        "pp and cp": PP | CP | BF16 | SHARDED,
        "pp and ep": PP | EP | BF16 | OVERLAP,
        "tp, pp, aoe": SP | PP | AOE_ALL | BF16 | GATHER | SHARDED,
        "tp and ep": SP | EP | BF16 | SHARDED | {"expert_tensor_parallel_size": 1},
        "ep and etp": SP | EP | BF16,
        "threshold, ep and etp": THRESHOLD | SP | EP | BF16,
        "coupling loss, ep and etp": ERC | SP | EP | BF16,
        "uoe, pp and ep": UOE | PP | EP | BF16 | OVERLAP,
        "ep and etp, gathered": SP | EP | BF16 | AOE_ALL | GATHER,
    }
    for of_rank in run_distributed(4, _sent, 4, cases):
        _compare(of_rank)


def _on_links(options: Options, node_size: int) -> tuple[Wire, Wire]:
    """(by plan, counted): bytes of all-to-alls and sends of a step in a node and between nodes."""
    config = config_of(options)
    engine = engine_of(config)
    with factors_stay_bf16(), Messages() as messages:
        engine.step(batches(config))
    rank, stage = dist.get_rank(), engine.groups.pp.rank()
    layout = layout_of(config, dist.get_world_size())
    planned = wire_of(
        (
            each
            for each in messages_of_stage(planned_shape(config), layout, stage)
            if each.kind in ("all-to-all", "send")
        ),
        node_size,
    )
    node = network = 0
    for receiver, size in messages.to_rank.items():
        if receiver // node_size != rank // node_size:
            network += size
        elif receiver != rank:
            node += size
    destroy_groups()
    return planned, Wire(node, network)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [BF16 | EP | {"expert_model_parallel_size": 4}, BF16 | EP, BF16 | PP | EP],
    ids=["ep over nodes", "ep in a node", "stages on nodes"],
)
def test_links_of_four_ranks(options: Options) -> None:
    for planned, counted in run_distributed(4, _on_links, options, 2):
        assert planned == counted


def _wire(kind: str, size: int, stride: int, nbytes: int = 1600) -> Wire:
    return Collective("", "", kind, Group("", size, stride), nbytes, 1).wire(node_size=8)


def test_links_by_hand() -> None:
    # 16 ranks on 2 nodes: 7 of 15 parts of an all-to-all stay on the node, 8 leave it.
    assert _wire("all-to-all", 16, 1, 1500) == Wire(700, 800)
    assert _wire("all-to-all", 8, 1, 700) == Wire(700, 0)
    # A ring over 2 nodes: 15/16 of the bytes pass each link; 8 ranks share the node's border.
    assert _wire("reduce-scatter", 16, 1) == Wire(1500, 1500 / 8)
    assert _wire("all-reduce", 16, 1) == Wire(3000, 3000 / 8)
    assert _wire("all-gather", 16, 1, 100) == Wire(1500, 1500 / 8)
    # Ranks 8 apart are on different nodes; each has the network card of its own GPU.
    assert _wire("reduce-scatter", 4, 8) == Wire(0, 1200)
    assert _wire("send", 4, 8) == Wire(0, 1600)
    assert _wire("send", 2, 4) == Wire(1600, 0)


def test_nothing_is_sent_alone() -> None:
    config = config_of(BF16 | SHARDED)
    assert messages_of_stage(planned_shape(config), layout_of(config, 1), 0) == []
    assert wire_of([], 8) == Wire()
