"""Zero-computation experts: their outputs, their load, and what they save."""

import numpy
import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed as dist

from moe_parallel.balancing.bias import AnchoredBias
from moe_parallel.config import make_config
from moe_parallel.layers import LayerContext
from moe_parallel.layers.system import system_of
from moe_parallel.ops import select_backend
from moe_parallel.parallel import destroy_groups, groups_of_one, initialize_groups
from moe_parallel.telemetry.statistics import RoutingStatistics
from tests.distributed import run_distributed
from tests.layers.cases import CASES, COPIES, direction, top_p, topk
from tests.layers.expected import expected_routing
from tests.layers.single import EXPERT_WIDTH, EXPERTS, WIDTH, Case, build, run, values

ALONE = groups_of_one().tp_dp_cp


def output(case: Case, given: dict[str, numpy.ndarray]) -> numpy.ndarray:
    y, _ = run(build(case, given, torch.float64, "reference"), given, direction(case))
    return y


def test_statistics_are_about_the_other_experts():
    case, given = CASES["topk, free experts"], values(CASES["topk, free experts"])
    layer = build(case, given, torch.float64, "reference")
    run(layer, given, direction(case))
    (summary,) = layer.context.statistics.training.summaries()
    chosen = [expert for row in expected_routing(case, given)[0].experts for expert in row]
    counts = [chosen.count(expert) for expert in range(EXPERTS)]
    assert summary["tokens_per_expert"] == counts
    assert summary["experts_per_token"] == pytest.approx(sum(counts) / case.tokens)
    assert summary["free_share"] == pytest.approx(1 - sum(counts) / len(chosen))
    assert 0 < summary["free_share"] < 1


def test_a_target_of_top_p_is_about_the_other_experts():
    case = Case(top_p(moe_top_p_target_experts=2.0, moe_copy_experts=2))
    layer = build(case, values(case), torch.float64, "reference")
    run(layer, values(case), direction(case))
    (summary,) = layer.context.statistics.training.summaries()
    assert layer.controller.counts.tolist() == [sum(summary["tokens_per_expert"]), case.tokens]
    assert summary["free_share"] > 0


def test_at_its_target_the_bias_stays():
    bias = AnchoredBias(2, 0.5, num_free=1, k=3, k_e=2.0)
    bias.update(torch.tensor([100.0, 100.0, 100.0], dtype=torch.float64), ALONE)
    assert bias.bias_E.tolist() == [0.0, 0.0, 0.0]
    by_default = AnchoredBias(6, 0.5, num_free=1, k=7, k_e=6)
    by_default.update(torch.full((7,), 99.0, dtype=torch.float64), ALONE)
    assert by_default.bias_E.tolist() == [0.0] * 7


def test_the_bias_moves_in_proportion_and_free_experts_stay_at_zero():
    """300 choices, so 100 tokens: the target is 100 for each of the two experts."""
    bias = AnchoredBias(2, 0.5, num_free=1, k=3, k_e=2.0)
    bias.update(torch.tensor([80.0, 150.0, 70.0], dtype=torch.float64), ALONE)
    torch.testing.assert_close(bias.bias_E, torch.tensor([0.1, -0.25, 0.0]))  # not centered


def _bytes_sent(choices: list[tuple[int, int]]) -> list[float]:
    """By pair of choices of every token, what this rank sends. Experts 2 and 3 are on rank 1, and
    two copies have the numbers after them."""
    groups = initialize_groups(make_config({"expert_model_parallel_size": 2}).parallel)
    selection = topk(aux=0.0, z=0.0, **COPIES)
    config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=1, num_moe_experts=EXPERTS
    )
    found = []
    for pair in choices:
        statistics = RoutingStatistics(1, EXPERTS, torch.device("cpu"))
        context = LayerContext(groups, select_backend("reference"), statistics, None, 1)
        layer = system_of(selection).build(config, selection, EXPERT_WIDTH, context)
        layer.set_layer_number(1)
        with torch.no_grad():
            for weight in layer.parameters():
                weight.fill_(0.1)
            layer.w_router_ED[list(pair)] = 1.0
        layer(torch.ones(8, 1, WIDTH))
        (summary,) = statistics.training.summaries()
        found.append(summary.get("wire_bytes_per_token", 0.0))
    dist.barrier()
    destroy_groups()
    return found


def test_less_is_sent_where_free_experts_are_chosen():
    """A row is 5 numbers and its prob, in 32 bytes, and comes back as 5 numbers, 20 bytes. Of two
    choices on different ranks each rank sends one row and returns one; of one choice on rank 1
    rank 0 sends and rank 1 returns; of two free experts nobody sends anything."""
    sent = run_distributed(2, _bytes_sent, [(0, 2), (2, 4), (4, 5)])
    assert sent == [[52, 32, 0], [52, 20, 0]]
