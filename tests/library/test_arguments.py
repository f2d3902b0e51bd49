"""The arguments of AoE and RoutedMoE, and the errors for wrong arguments and inputs."""

from typing import Any

import pytest
import torch

from moe_parallel import AoE, RoutedMoE
from moe_parallel.errors import InputError
from moe_parallel.systems import (
    AoEExpertChoiceSelection,
    AoESelection,
    AoEThresholdSelection,
    AoETopPSelection,
    ExpertChoiceSelection,
    LorySelection,
    RoutingFreeSelection,
    SegmentExpertChoiceSelection,
    ThresholdSelection,
    TopKSelection,
    TopPSelection,
)
from tests.library.small import small

SELECTIONS = [
    (AoE, AoESelection(aoe_low_rank_size=4, aoe_gradient="selected", moe_aux_loss_coeff=0.0)),
    (AoE, AoETopPSelection(aoe_low_rank_size=4)),
    (AoE, AoEExpertChoiceSelection(aoe_low_rank_size=4)),
    (AoE, AoEThresholdSelection(aoe_low_rank_size=4)),
    (AoE, RoutingFreeSelection(aoe_low_rank_size=4)),
    (RoutedMoE, TopKSelection(moe_router_num_groups=2, moe_router_group_topk=1)),
    (RoutedMoE, TopKSelection(moe_gate_low_rank_size=4, moe_input_jitter_eps=0.1)),
    (RoutedMoE, TopKSelection(moe_zero_experts=1, moe_copy_experts=1, moe_constant_experts=2)),
    (AoE, AoESelection(aoe_low_rank_size=4, moe_copy_experts=2)),
    (RoutedMoE, TopPSelection()),
    (RoutedMoE, ThresholdSelection()),
    (RoutedMoE, ExpertChoiceSelection()),
    (RoutedMoE, SegmentExpertChoiceSelection(lory_segment_length=2)),
]


@pytest.mark.parametrize(("kind", "selection"), SELECTIONS)
def test_every_selection_that_makes_sense_alone(kind: Any, selection: Any) -> None:
    moe = kind(16, 4, selection=selection)
    assert moe.config.selection == selection
    for training in (True, False):
        y = moe.train(training)(torch.randn(2, 6, 16))
        assert y.isfinite().all() and y.abs().max() > 0
        (y.sum() + moe.aux_loss).backward()


@pytest.mark.parametrize(("kind", "selection"), SELECTIONS)
def test_without_tokens_every_weight_has_a_gradient(kind: Any, selection: Any) -> None:
    moe = kind(16, 4, selection=selection)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = moe(torch.empty(2, 0, 16))
        assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
        for loss in (y.sum(), moe.aux_loss):
            moe.zero_grad()
            loss.backward(retain_graph=True)
            assert all(weight.grad.count_nonzero() == 0 for weight in moe.parameters())
    moe.after_step()
    assert moe(torch.randn(2, 6, 16)).isfinite().all()


@pytest.mark.parametrize(("kind", "selection"), SELECTIONS)
def test_only_the_reference_has_a_second_derivative(kind: Any, selection: Any) -> None:
    x = torch.randn(2, 6, 16)

    def second(backend: str) -> torch.Tensor:
        moe = kind(16, 4, selection=selection, backend=backend)
        found = torch.autograd.functional.hvp(lambda x: moe(x).square().sum(), x, x)[1]
        return found.abs().sum()

    assert second("reference") > 0
    with pytest.raises(InputError, match="create_graph=True asks for a second derivative"):
        second("native")


def test_options_by_name_are_those_of_the_selection() -> None:
    moe = AoE(16, 4, 3, 8, 40, aux_loss_coeff=0.2, expert_bias=True, backend="reference")
    selection = AoESelection(
        moe_router_topk=3,
        aoe_low_rank_size=8,
        aoe_wide_size=40,
        aoe_up_init_method="scaled",
        moe_aux_loss_coeff=0.2,
        moe_router_enable_expert_bias=True,
    )
    assert moe.config.selection == selection
    assert AoE(16, 4, selection=selection, backend="reference").config == moe.config
    assert "hidden_size=16, num_experts=4, expert_width=40, selection=AoESelection" in repr(moe)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (AoE, {"top_k": 5}, "top_k is 5, above num_experts 4: choose at most 4"),
        (AoE, {"top_k": 0}, "top_k is 0: it must be at least 1"),
        (AoE, {"hidden_size": None}, "hidden_size is None: give it an integer"),
        (AoE, {"up_init_method": "small"}, "up_init_method is 'small': it takes one of .*scaled"),
        (AoE, {"low_rank_size": 500}, r"lower low_rank_size \(or .*\), or set wide_size"),
        (RoutedMoE, {"capacity_factor": 0.0}, "capacity_factor is 0.0: it must be above 0"),
        (RoutedMoE, {"backend": "cuda"}, "backend is 'cuda': it takes one of reference, .*"),
        (
            AoE,
            {"selection": AoESelection(moe_router_topk=5)},
            "moe_router_topk is 5, above num_experts 4: choose at most 4",
        ),
        (
            AoE,
            {"selection": AoESelection(), "top_k": 1},
            "top_k and selection are both given: leave top_k out, and set moe_router_topk of .*",
        ),
        (
            RoutedMoE,
            {"selection": LorySelection()},
            "selection is of type LorySelection: RoutedMoE takes one of TopKSelection, .*",
        ),
    ],
)
def test_wrong_arguments(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        kind(**{"hidden_size": 16, "num_experts": 4} | options)
    assert "\n" not in str(caught.value) and "--" not in str(caught.value)


def test_wrong_inputs() -> None:
    moe = small()
    with pytest.raises(InputError, match=r"x is of shape \[2, 15\]: its last axis .* 16"):
        moe(torch.randn(2, 15))
    with pytest.raises(InputError, match="x is torch.bfloat16 and the weights are torch.float32"):
        moe(torch.randn(2, 16, dtype=torch.bfloat16))
