"""CoRM: scores by hand, what follows from their formula, and the reference of several steps.

test_expert_layers.py compares it with a loop over tokens; the layouts of tests/model, with one
process.
"""

import numpy
import pytest
import torch
import torch.distributed as dist

from moe_parallel.systems.corm import CoRMSelection
from moe_parallel.systems.corm.rule import Reference
from tests.distributed import run_distributed
from tests.layers.cases import CASES, REFERENCE, corm
from tests.layers.single import EXPERTS, WIDTH, Case, SingleRank, build, values


def layer_of(case, given=None, dtype=torch.float64):
    return build(case, values(case) if given is None else given, dtype, "reference")


def scores(case, given):
    x_TD = torch.from_numpy(given["x"]).flatten(0, 1)
    return layer_of(case, given).scores(x_TD).detach().numpy()


def test_scores_by_hand():
    """The key of the token (3, 4) is (.6, .8). Queries copy two numbers, or exchange them."""
    case = Case(
        CoRMSelection(moe_router_topk=1, corm_key_size=2), tokens=1, reference=(1, 0, 0, 0, 0)
    )
    given = {name: numpy.zeros_like(array) for name, array in values(case).items()}
    given["x"][..., :2] = (3, 4)
    given["w_key_RD"][:, :2] = [[2, 0], [0, 2]]
    given["w_query_ERD"][0, :, :2] = [[1, 0], [0, 1]]  # at x (.6, .8), at the reference (1, 0)
    given["w_query_ERD"][1, :, :2] = [[0, 1], [1, 0]]  # at x (.8, .6), at the reference (0, 1)
    given["w_query_ERD"][2, :, :2] = [[0, 7], [7, 0]]  # in the same directions
    gaps = numpy.array([1 - 0.6, 0.96 - 0.8, 0.96 - 0.8, 0])
    assert scores(case, given)[0] == pytest.approx(gaps / 2**0.5, abs=1e-6)


def test_the_mean_token_suits_all_experts_equally():
    """Lengths do not matter: every query at the token is that at the reference."""
    case = Case(corm(), tokens=1, reference=REFERENCE)
    given = values(case)
    given["x"][0, 0] = 5 * numpy.array(REFERENCE)
    assert abs(scores(case, given)).max() < 1e-6


def test_only_directions_count_and_scores_are_bounded():
    case = CASES["corm"]
    given = values(case)
    before = scores(case, given)
    scaled = {name: 30 * given[name] for name in ("x", "w_key_RD", "w_query_ERD")}
    assert scores(case, given | scaled) == pytest.approx(before, abs=1e-6)
    assert 0 < abs(before).max() <= 2 / case.selection.corm_key_size**0.5
    assert (scores(CASES["corm, before the first update"], given) != before).all()


def test_scores_and_reference_of_a_bf16_layer_are_fp32():
    case = CASES["corm"]
    layer = layer_of(case, dtype=torch.bfloat16).bfloat16()
    x_TD = torch.from_numpy(values(case)["x"]).flatten(0, 1).bfloat16()
    assert layer.scores(x_TD).dtype == layer.reference.mean_D.dtype == torch.float32
    assert layer.reference.step.sums.dtype == torch.float64
    assert layer.reference.mean_D.tolist() == torch.tensor(REFERENCE).tolist()


ONE = SingleRank()


def test_the_reference_by_hand():
    """It goes a quarter of the way to the mean token of a step of two micro-batches."""
    reference = Reference(2, 0.25)
    reference.update(ONE)  # without tokens
    assert reference.mean_D.tolist() == [0, 0]
    reference.observe(torch.tensor([[0.0, 4.0], [2.0, 0.0]]))
    reference.observe(torch.tensor([[3.0, 0.0], [1.0, 4.0]]))
    assert reference.mean_D.tolist() == [0, 0]
    reference.update(ONE)
    assert reference.mean_D.tolist() == [0.375, 0.5]
    reference.observe(torch.tensor([[4.0, 0.0]]))
    reference.update(ONE)
    assert reference.mean_D.tolist() == [1.28125, 0.375]
    reference.update(ONE)
    assert reference.mean_D.tolist() == [1.28125, 0.375]


def test_it_moves_after_a_step_by_what_was_trained_on():
    case = CASES["corm"]
    layer = layer_of(case, dtype=torch.float32)
    x_SBD = torch.randn(3, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    layer(x_SBD)
    layer(x_SBD + 1)
    with torch.no_grad():  # the first pass of a recomputation
        layer(x_SBD + 100)
    layer.eval()(x_SBD + 100)
    assert layer.reference.mean_D.tolist() == pytest.approx(REFERENCE)
    layer.after_step()
    wanted_D = 0.99 * torch.tensor(REFERENCE) + 0.01 * (x_SBD.mean((0, 1)) + 0.5)
    assert layer.reference.mean_D.tolist() == pytest.approx(wanted_D.tolist())
    assert set(layer.state_dict()) >= {"reference.mean_D"}


def test_queries_at_the_reference_learn_and_the_reference_does_not():
    case = CASES["corm, evaluated"]
    given = values(case)
    layer = layer_of(case, given)
    x_TD = torch.from_numpy(given["x"]).flatten(0, 1)
    layer.scores(x_TD).sum().backward()
    assert (layer.w_query_ERD.grad.flatten(1).norm(dim=1) > 0).all()
    assert not layer.reference.mean_D.requires_grad
    layer.w_query_ERD.grad = None
    layer.reference.mean_D.zero_()
    layer.scores(x_TD).sum().backward()  # a query of length 0 has no direction, and no gradient
    assert layer.w_query_ERD.grad.isfinite().all() and len(layer.w_query_ERD) == EXPERTS


def _mean_of_ranks():
    reference = Reference(2, 0.5)
    rank = dist.get_rank()
    reference.observe(torch.tensor([[2.0 * rank, 8.0]]))
    reference.update(dist.group.WORLD)
    return reference.mean_D.tolist()


def test_ranks_have_one_reference():
    assert run_distributed(2, _mean_of_ranks) == [[0.5, 4.0]] * 2
