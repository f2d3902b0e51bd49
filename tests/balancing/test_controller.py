"""Controllers: what a step counts, how the setting moves, and where it is kept."""

import pytest
import torch
from torch import distributed as dist

from moe_parallel.balancing.controller import Controller, LossCoefficient, end_step, setting_of
from moe_parallel.parallel import groups_of_one
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens
from moe_parallel.systems.top_p.rule import MovingTopP, TopP, TopPController
from tests.distributed import run_distributed

ALONE, CPU = groups_of_one().tp_dp_cp, torch.device("cpu")


def choices_of(experts: list[list[int]], num_experts: int = 4) -> Choices:
    experts_TK = torch.tensor(experts)
    scores_TE = torch.zeros(len(experts), num_experts)
    return Choices(experts_TK, torch.ones(experts_TK.shape), scores_TE, scores_TE)


def counts_of(choices: int, tokens: int) -> torch.Tensor:
    return torch.tensor([choices, tokens], dtype=torch.float64)


class Recorded(Controller):
    """Keeps the counts of each step."""

    def __init__(self) -> None:
        super().__init__([1.0], 2.0)
        self.steps: list[list[float]] = []

    def move(self, counts: torch.Tensor) -> None:
        self.steps.append(counts.tolist())


def test_a_step_counts_choices_and_tokens_of_all_layers():
    layers = [Recorded(), Recorded()]
    layers[0].count(choices_of([[0, 1], [2, -1]]))
    layers[1].count(choices_of([[3, -1], [-1, -1], [0, 1]]))
    layers[1].count(choices_of([[2, 1]]))
    end_step(layers, CPU, ALONE)
    layers[0].count(choices_of([[0, -1]]))
    end_step(layers, CPU, ALONE)
    assert [layer.steps for layer in layers] == [[[8, 6], [1, 1]]] * 2


def _uneven_stages():
    """Rank 0 has no layer of experts, and rank 1 has two."""
    layers = [Recorded() for _ in range(2 * dist.get_rank())]
    for number, layer in enumerate(layers):
        layer.count(choices_of([[0, 1]] * (number + 1)))
        layer.state += 0.5
    end_step(layers, CPU)
    return [layer.steps for layer in layers], setting_of(layers, CPU)


def _uneven_choices():
    """Rank 0 has one token with two experts, rank 1 two tokens with one expert each."""
    layer = Recorded()
    layer.count(choices_of([[[0, 1]], [[2, -1], [3, -1]]][dist.get_rank()]))
    end_step([layer], CPU)
    return layer.steps


def test_a_step_counts_choices_and_tokens_of_all_ranks():
    assert run_distributed(2, _uneven_choices) == [[[4, 3]]] * 2


def test_a_rank_without_experts_takes_part():
    assert run_distributed(2, _uneven_stages) == [([], 1.5), ([[[6, 3]], [[6, 3]]], 1.5)]


def test_bf16_models_keep_an_fp32_state_which_alone_is_saved():
    controller = LossCoefficient(1e-8, 2, 1.2).bfloat16()
    assert controller.state.dtype == torch.float32
    assert controller.counts.dtype == torch.float64
    assert list(controller.state_dict()) == ["state"]
    assert not list(controller.parameters())


# One of n = 4 experts per token is a share of .75 zero gates.
@pytest.mark.parametrize(
    ("share_of_zeros", "coefficient"), [(0.5, 1.2e-8), (0.8, 1e-8 / 1.2), (0.75, 1e-8)]
)
def test_a_coefficient_grows_while_too_few_gates_are_zero(share_of_zeros, coefficient):
    controller, tokens = LossCoefficient(1e-8, target=1, factor=1.2), 1000
    before = controller.state.clone()
    controller.move(counts_of(round((1 - share_of_zeros) * 4 * tokens), tokens))
    assert controller.setting.item() == pytest.approx(coefficient, rel=1e-6)
    assert torch.equal(controller.state, before) == (share_of_zeros == 0.75)


def test_one_choice_more_or_less_moves_a_coefficient():
    for difference in (-1, 0, 1):
        controller = LossCoefficient(1.0, target=2, factor=2.0)
        controller.move(counts_of(2**41 + difference, 2**40))
        assert controller.setting.item() == 2.0**difference


def test_p_follows_the_error_and_its_sum():
    controller = TopPController(0.5, 8, 64, proportional_gain=0.5, integral_gain=0.2)
    controller.move(counts_of(1200, 100))  # 12 instead of 8 experts: an error of -1/16
    assert controller.setting.item() == pytest.approx(0.5 - 0.04375)
    for _ in range(2):
        controller.move(counts_of(800, 100))  # the sum of the errors remains
        assert controller.setting.item() == pytest.approx(0.5 - 0.0125)


def _mean_number(p: torch.Tensor, logits_TE: torch.Tensor) -> torch.Tensor:
    """The counts of top-p with `p`."""
    choices = TopP(p.item())(logits_TE, Tokens(1))
    return counts_of(int(choices.tokens_per_expert().sum()), len(logits_TE))


# p for K experts of n with standard normal logits, from a simulation.
@pytest.mark.parametrize(("n", "k", "p"), [(8, 2, 0.461), (16, 4, 0.548), (64, 8, 0.409)])
def test_p_reaches_the_target(n, k, p):
    logits_TE = torch.randn(2000, n, generator=torch.Generator().manual_seed(0))
    controller = TopPController(0.3, k, n, proportional_gain=0.5, integral_gain=0.2)
    for _ in range(100):
        controller.move(_mean_number(controller.setting, logits_TE))
    choices, tokens = _mean_number(controller.setting, logits_TE)
    assert choices / tokens == pytest.approx(k, rel=0.02)
    assert controller.setting.item() == pytest.approx(p, abs=0.01)


def test_p_stays_within_its_limits():
    controller = TopPController(0.5, 1, 4, proportional_gain=10.0, integral_gain=0.1)
    controller.move(counts_of(400, 100))
    assert controller.setting.item() == 0.25
    controller.move(counts_of(0, 100))
    assert controller.setting.item() == 1.0


def test_only_a_moving_p_is_controlled():
    controller = TopPController(0.5, 2, 4, 0.5, 0.2)
    fixed = TopP(0.3)
    assert controller.of(fixed) is fixed
    logits_TE = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    rule = controller.of(MovingTopP(0.3))
    for p in (0.25, 0.4, 0.9, 1.0):
        controller.state[0] = p
        found, wanted = rule(logits_TE, Tokens(1)), TopP(p)(logits_TE, Tokens(1))
        assert torch.equal(found.experts_TK, wanted.experts_TK)
