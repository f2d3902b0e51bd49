"""The toy of Appendix B: it computes the paper's definitions and shows the paper's results."""

from pathlib import Path

import numpy
import pytest
import torch

from examples.toy.appendix_b import AutonomousToy, History, RoutedToy, draw, inputs_of, main, train
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


def test_classes_do_not_overlap_within_three_sigma() -> None:
    # The means are 1 apart in each of 16 coordinates; half of that is 3.3 sigma.
    x_TD = inputs_of(torch.arange(3).repeat_interleave(2000), torch.Generator().manual_seed(0))
    means_3D = x_TD.unflatten(0, (3, -1)).mean(1)
    assert means_3D.numpy() == pytest.approx(numpy.outer([1, -1, 0], numpy.ones(16)), abs=0.02)
    assert x_TD[4000:].std().item() == pytest.approx(0.15, rel=0.02)


def history(share_of_class_3: float) -> History:
    share_MYE = torch.tensor(
        [[[1.0, 0.0], [1.0, 0.0], [s, 1 - s]] for s in (0.8, share_of_class_3)]
    )
    return History([0, 10], share_MYE, share_MYE, torch.ones(2, 3), arrival=0)


@pytest.mark.parametrize(("share", "split", "divided"), [(0.05, False, True), (0.5, True, False)])
def test_what_counts_as_split_and_as_divided(share: float, split: bool, divided: bool) -> None:
    end = history(share)
    assert (end.splits_class_3(-1), end.divided_in_the_end) == (split, divided)
    assert end.one_has_both and not end.each_has_one


def test_a_short_run_is_measured_and_drawn(tmp_path: Path) -> None:
    moe, aoe = ([train(toy, seed=0, steps=4)] for toy in (RoutedToy, AutonomousToy))
    assert aoe[0].steps_M == [0, 4, 5, 8]
    assert aoe[0].arrival == 1
    assert aoe[0].share_MYE.sum(2).numpy() == pytest.approx(1)
    draw(moe, aoe).savefig(tmp_path / "toy.png")
    assert (tmp_path / "toy.png").read_bytes()[:4] == b"\x89PNG"


def test_no_seeds_is_a_wrong_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["appendix_b.py", "--seeds", "0"])
    with pytest.raises(SystemExit, match="2"):
        main()


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
