"""Zero-computation experts: their outputs, their load, and what they save."""

from typing import Any

import numpy
import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed as dist

from moe_parallel.balancing.bias import AnchoredBias
from moe_parallel.balancing.losses import LossContext, load_balancing, load_balancing_loss
from moe_parallel.config import make_config
from moe_parallel.layers import LayerContext
from moe_parallel.layers.system import system_of
from moe_parallel.ops import select_backend
from moe_parallel.parallel import destroy_groups, groups_of_one, initialize_groups
from moe_parallel.selection.capacity import DROP_ORDERS, Capacity
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens
from moe_parallel.telemetry.statistics import RoutingStatistics
from tests.distributed import run_distributed
from tests.layers.cases import ANCHORED, CASES, COPIES, direction, top_p, topk
from tests.layers.expected import expected_routing
from tests.layers.single import EXPERT_WIDTH, EXPERTS, WIDTH, Case, build, run, values

ALONE = groups_of_one().tp_dp_cp


def output(case: Case, given: dict[str, numpy.ndarray]) -> numpy.ndarray:
    y, _ = run(build(case, given, torch.float64, "reference"), given, direction(case))
    return y


def choosing(k: int, free: int, **options: Any) -> tuple[Case, dict[str, numpy.ndarray]]:
    """A layer in which every token chooses `free` free experts first, then others."""
    case = Case(topk(k=k, aux=0.0, z=0.0, **options))
    given = values(case)
    given["w_router_ED"][EXPERTS : EXPERTS + free, 0] = 100.0 + 10.0 * numpy.arange(free)
    return case, given


def test_zero_experts_alone_give_zero():
    case, given = choosing(2, 2, moe_zero_experts=2)
    assert (output(case, given) == 0).all()


def test_a_copy_alone_gives_its_input():
    case, given = choosing(1, 1, moe_copy_experts=1)
    numpy.testing.assert_allclose(output(case, given), given["x"], rtol=1e-6)


@pytest.mark.parametrize(("gate", "scale"), [("keep", None), ("renormalize", 1.0)])
def test_the_prob_beside_a_zero_expert_is_kept_or_renormalized(gate, scale):
    """With the scores ln 3 and 0, the others' prob is 1/4, or 1."""
    case, given = choosing(2, 1, moe_zero_experts=1, moe_zero_expert_gate=gate)
    given["w_router_ED"][:] = 0
    given["w_router_ED"][EXPERTS, 0] = numpy.log(3)
    given["w_router_ED"][1:EXPERTS, 0] = -9
    alone = Case(topk(k=1, aux=0.0, z=0.0, moe_router_pre_softmax=True))
    rest = given | {"w_router_ED": given["w_router_ED"][:EXPERTS] * 100}
    whole = output(alone, rest)  # expert 0 with the prob 1
    numpy.testing.assert_allclose(output(case, given), whole * (scale or 0.25), rtol=1e-5)


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


def choices_of_load(load: list[int], probabilities: list[float]) -> Choices:
    """As many tokens as an expert of `load` has choices; all have these probabilities."""
    experts = [expert for expert, count in enumerate(load) for _ in range(count)]
    experts_TK = torch.tensor(experts).view(-1, 2)
    table_TE = torch.tensor([probabilities] * len(experts_TK))
    return Choices(experts_TK, torch.ones(experts_TK.shape), table_TE, table_TE)


def test_at_balance_free_experts_have_1_over_tau_of_a_load():
    """16 + 4 experts, tau 3/4, K 2: three quarters of the choices are the experts', and the loss is
    K / (16 + 4 / tau) = 0.09375, times the 20 columns."""
    selection = topk(aux=0.01, moe_copy_experts=4)
    loss = load_balancing(selection, LossContext(1))
    assert loss.coefficient == 0.01
    choices = choices_of_load([3] * 16 + [4] * 4, [3 / 64] * 16 + [4 / 64] * 4)
    share_E = choices.tokens_per_expert() / len(choices.experts_TK)
    assert share_E[:16].sum() == 1.5
    assert loss.of(choices, Tokens(1)).item() / 20 == pytest.approx(0.09375)


def test_without_free_experts_it_is_the_loss_of_switch():
    choices = choices_of_load([5, 1, 0, 2], [0.4, 0.3, 0.2, 0.1])
    loss = load_balancing(topk(moe_copy_experts=0), LossContext(1))
    assert loss.of(choices, Tokens(1)) == load_balancing_loss(choices, Tokens(1))
    every = load_balancing(topk(moe_copy_experts=1, moe_free_expert_tau=1.0), LossContext(1))
    assert every.of(choices, Tokens(1)) == load_balancing_loss(choices, Tokens(1))


def test_with_the_factor_1_capacities_hold_all_choices():
    capacity = Capacity(1.0, DROP_ORDERS["probs"], pad=False, k=2, num_free=4, tau=0.75)
    assert capacity.rows_per_expert(32, 16) == 3
    experts_TK = torch.arange(64).view(32, 2) % 20
    flat_TE = torch.zeros(32, 20)
    kept = capacity.keep(Choices(experts_TK, torch.ones(32, 2), flat_TE, flat_TE), Tokens(1))
    # Each of the 16 had 3 or 4 choices and keeps 3; each of the 4 had 3 and may have 4.
    assert kept.tokens_per_expert().tolist() == [3.0] * 20


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


def test_the_bias_brings_the_experts_to_their_share():
    budget = {"moe_ffn_experts_per_token": 1.2, "moe_router_bias_update_rate": 0.05}
    case = Case(topk(aux=0.0, z=0.0, **COPIES, **ANCHORED, **budget), tokens=256)
    given = values(case)
    layer = build(case, given, torch.float64, "reference")
    counts = []
    for _ in range(150):
        layer(torch.from_numpy(given["x"]))
        counts.append(layer.load.counts[:EXPERTS].sum().item() / case.tokens)
        layer.balance(ALONE)
    assert abs(counts[0] - 1.2) > 0.05
    assert counts[-1] == pytest.approx(1.2, abs=0.05)
    assert (layer.bias.bias_E[EXPERTS:] == 0).all()


def test_free_choices_are_not_dispatched():
    case, given = CASES["topk, free experts"], values(CASES["topk, free experts"])
    layer = build(case, given, torch.float64, "reference")
    run(layer, given, direction(case))
    chosen = [expert for row in expected_routing(case, given)[0].experts for expert in row]
    choices = layer.choose(torch.from_numpy(given["x"]).flatten(0, 1), Tokens(1))
    kept = layer.dispatched(choices).experts_TK
    assert (kept >= 0).sum() == sum(expert < EXPERTS for expert in chosen)
    assert kept.max() < EXPERTS


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
