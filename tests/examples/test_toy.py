"""The toy of Appendix B: it computes the paper's definitions and shows the paper's results."""

from pathlib import Path

import numpy
import pytest
import torch

from examples.toy.appendix_b import AutonomousToy, RoutedToy, draw, inputs_of, train
from tests.oracles.layers import autonomous_expert, softmax, swiglu_expert

SEEDS = (0, 1, 2)


def inputs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return inputs_of(torch.tensor([0, 1, 2, 2, 2]), generator)


def weights(toy: torch.nn.Module) -> dict[str, numpy.ndarray]:
    return {name: p.detach().double().numpy() for name, p in toy.named_parameters()}


def test_a_router_picks_the_expert_and_weighs_it_by_its_probability() -> None:
    torch.manual_seed(0)
    toy = RoutedToy()
    w = weights(toy)
    taken = set()
    for x_D, y_Y in zip(inputs().double().numpy(), toy(inputs()).detach().numpy(), strict=True):
        logits_E = x_D @ w["w_router_DE"]
        best = int(numpy.argmax(logits_E))
        expert = swiglu_expert(x_D, w["w_g_EDF"][best], w["w_p_EDF"][best], w["w_out_EFY"][best])
        assert y_Y == pytest.approx(softmax(logits_E)[best] * expert, rel=1e-4, abs=1e-6)
        taken.add(best)
    assert taken == {0, 1}


def test_the_expert_of_greatest_norm_answers_alone() -> None:
    torch.manual_seed(3)
    toy = AutonomousToy()
    w = weights(toy)
    taken = set()
    for x_D, y_Y in zip(inputs().double().numpy(), toy(inputs()).detach().numpy(), strict=True):
        norms_E = [numpy.sqrt(((x_D @ w_DR) ** 2).sum()) for w_DR in w["w_down_EDR"]]
        best = int(numpy.argmax(norms_E))
        matrices = [w[name][best] for name in ("w_down_EDR", "w_up_ERW", "w_p_EDW", "w_out_EWY")]
        assert y_Y == pytest.approx(autonomous_expert(x_D, *matrices), rel=1e-4, abs=1e-6)
        taken.add(best)
    assert taken == {0, 1}


def test_a_short_run_is_measured_and_drawn(tmp_path: Path) -> None:
    moe, aoe = ([train(toy, seed=0, steps=4)] for toy in (RoutedToy, AutonomousToy))
    assert aoe[0].steps_M == [0, 4, 5, 8]
    assert aoe[0].arrival == 1
    assert aoe[0].share_MYE.sum(2).numpy() == pytest.approx(1)
    draw(moe, aoe).savefig(tmp_path / "toy.png")
    assert (tmp_path / "toy.png").read_bytes()[:4] == b"\x89PNG"


# Over 20 seeds (docs/toy.md): MoE always gave each class its own expert and then split class 3
# (0.46 to 0.54). AoE always gave both classes to one expert, and class 3 to the other one in all
# seeds except 17.
@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_a_router_divides_two_classes_and_splits_the_third(seed: int) -> None:
    seen = train(RoutedToy, seed)
    assert seen.each_has_one  # 1.00 and 0.00 of classes 1 and 2
    assert seen.splits_class_3(seen.arrival)  # 0.51, 0.52, 0.54
    assert seen.splits_class_3(-1)  # 0.50, 0.51, 0.54


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_an_autonomous_expert_takes_two_classes_and_the_idle_one_the_third(seed: int) -> None:
    seen = train(AutonomousToy, seed)
    assert seen.one_has_both  # 1.00 of both
    assert seen.divided_in_the_end  # 0.01, 0.05, 0.01 of class 3 remain with the first expert
