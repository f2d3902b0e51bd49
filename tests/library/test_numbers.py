"""AoE and RoutedMoE compute the same as the layers of training and the oracles."""

from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from moe_parallel import AoE, RoutedMoE
from moe_parallel.systems import AoESelection, TopKSelection
from tests.layers.cases import CASES
from tests.layers.expected import expected_output, expected_slopes
from tests.layers.single import EXPERT_WIDTH, EXPERTS, WIDTH, Arrays, Case, build, run, values
from tests.oracles.layers import slopes

Layer = AoE | RoutedMoE

SHARED = {"moe_shared_expert_intermediate_size": 2, "moe_shared_expert_gate": True}
# A single layer has no option for these: capacity by position, padded or without K, the number of
# MoE layers in the model, token ids. The scores of AoE's free experts have another unit here: it
# follows from the spread of initial weights.
NOT_ALONE = (
    "position", "pad", "K not counted", "per choice", "relu", "routing_free", "hash",
    "aoe, copies", "aoe, zero experts",
)  # fmt: skip
CASES_ALONE = [
    name
    for name, case in CASES.items()
    if isinstance(case.selection, AoE.SYSTEMS | RoutedMoE.SYSTEMS)
    and not any(word in name for word in NOT_ALONE)
]


def of_case(case: Case, weights: Arrays, dtype: torch.dtype = torch.float64) -> Layer:
    """A library layer with the weights and the state of a case."""
    selection = case.selection
    if case.autonomous:
        selection = replace(selection, aoe_wide_size=EXPERT_WIDTH)
    elif getattr(selection, "moe_gate_low_rank_size", None):
        pytest.skip("Eq. 5 sets the width of factorized experts, which the oracle's do not have")
    moe = (AoE if case.autonomous else RoutedMoE)(
        WIDTH,
        EXPERTS,
        selection=selection,
        ffn_hidden_size=EXPERT_WIDTH,
        capacity_factor=case.capacity_factor,
        dtype=dtype,
    )
    state = {name: torch.from_numpy(weights[name]) for name, _ in moe.layer.named_parameters()}
    moe.layer.load_state_dict(state, strict=False)
    if case.balance is not None:
        moe.layer.bias.bias_E.copy_(torch.tensor(case.balance))
    if case.load is not None:
        moe.layer.load.share_E.copy_(torch.tensor(case.load))
    if case.setting is not None:
        moe.layer.controller.state[0] = case.setting
    return moe.train(case.training)


def run_alone(moe: Layer, given: Arrays, direction: numpy.ndarray) -> tuple[Any, Arrays]:
    """Like `single.run`, with the input as [B, S, D]."""
    dtype = next(moe.parameters()).dtype
    x = torch.from_numpy(given["x"]).to(dtype).transpose(0, 1).contiguous().requires_grad_()
    y = moe(x)
    along = torch.from_numpy(direction).to(dtype).transpose(0, 1)
    ((y * along).sum() + moe.aux_loss).backward()
    gradients = {name: p.grad for name, p in moe.layer.named_parameters()}
    gradients["x"] = x.grad.transpose(0, 1)
    y = y.detach().transpose(0, 1)
    return y.double().numpy(), {name: g.double().numpy() for name, g in gradients.items()}


def directions(case: Case) -> numpy.ndarray:
    shape = (case.tokens // case.sequences, case.sequences, WIDTH)
    return numpy.random.default_rng(1).normal(size=shape)


@pytest.mark.parametrize("name", CASES_ALONE)
def test_outputs_and_gradients_are_those_of_training(name: str) -> None:
    case = CASES[name]
    given, along = values(case), directions(case)
    moe = of_case(case, given)
    y, gradients = run_alone(moe, given, along)
    trained_y, trained = run(build(case, given, torch.float64, "auto"), given, along)
    # If nothing depends on sequences, their tokens are routed in another order, in which a router
    # rounds the logits to fp32 differently.
    bound = 0 if case.sequences == 1 or moe._by_sequence else 3e-6
    numpy.testing.assert_allclose(y, trained_y, rtol=0, atol=bound)
    assert gradients.keys() == trained.keys()
    for key, gradient in trained.items():
        numpy.testing.assert_allclose(gradients[key], gradient, rtol=0, atol=bound, err_msg=key)


@pytest.mark.parametrize(
    "selection", [TopKSelection(**SHARED), AoESelection(aoe_low_rank_size=2, **SHARED)]
)
def test_a_shared_expert_is_the_oracles(selection: Any) -> None:
    """In training, it needs process groups."""
    case = Case(selection)
    given, along = values(case), directions(case)
    y, gradients = run_alone(of_case(case, given), given, along)
    numpy.testing.assert_allclose(y, expected_output(case, given), rtol=1e-5, atol=1e-6)
    for key, slope in expected_slopes(case, given, along).items():
        numpy.testing.assert_allclose(
            slopes(gradients[key]), slope, rtol=1e-4, atol=1e-5, err_msg=key
        )
