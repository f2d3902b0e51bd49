"""Contenders that differ: beyond rounding, in shape, in the kind of results."""

import pytest
import torch

from tools.bench.same_results import disagreement

VALUES = {"output 0": torch.tensor([1.0, -8.0]), "gradient of x": torch.tensor([0.5])}


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_rounding_is_no_difference(scale: float) -> None:
    expected = {name: value * scale for name, value in VALUES.items()}
    values = {name: value * (1 + 1e-6) for name, value in expected.items()}
    assert disagreement(values, expected, torch.float32) is None


def test_the_worst_value_is_named() -> None:
    values = VALUES | {"output 0": torch.tensor([1.0, -7.0])}  # 1/8 of the largest
    said = disagreement(values, VALUES, torch.float32)
    assert said == "output 0 is off by 1.2e-01 of its largest value"


def test_bf16_may_round_more() -> None:
    values = VALUES | {"output 0": torch.tensor([1.0, -7.9])}
    assert disagreement(values, VALUES, torch.bfloat16) is None
    assert disagreement(values, VALUES, torch.float32) is not None


def test_a_nan_differs() -> None:
    values = VALUES | {"gradient of x": torch.tensor([float("nan")])}
    assert "gradient of x is off by nan" in str(disagreement(values, VALUES, torch.float32))


def test_integers_are_equal_or_differ() -> None:
    one, other = {"experts": torch.tensor([1, 2])}, {"experts": torch.tensor([2, 1])}
    assert disagreement(one, one, torch.bfloat16) is None
    assert "experts is off by inf" in str(disagreement(one, other, torch.bfloat16))


def test_other_names_and_shapes_differ() -> None:
    fewer = {"output 0": VALUES["output 0"]}
    assert "has output 0 instead of" in str(disagreement(fewer, VALUES, torch.float32))
    reshaped = VALUES | {"gradient of x": torch.tensor([[0.5]])}
    said = disagreement(reshaped, VALUES, torch.float32)
    assert said == "gradient of x is (1, 1), not (1,)"
