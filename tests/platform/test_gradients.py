"""The norm of gradients on a CPU host, compared with fp64."""

import math
from collections.abc import Iterator

import pytest
import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads, optimizer

from moe_parallel.platform.gradients import (
    l2_norm_by_rows,
    l2_norm_of_list,
    replace_gradient_loops,
    scale_list,
)

CHUNK = 2**16  # elements; the size that Megatron-Core passes on a CPU


def norm(*tensors: torch.Tensor, chunk: int = CHUNK) -> float:
    found, _ = l2_norm_by_rows(chunk, torch.zeros(1), [list(tensors)], False)
    assert found.shape == (1,)
    assert found.dtype == torch.float32
    return found.item()


def test_by_hand():
    assert norm(torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])) == 5.0
    assert norm(torch.arange(1.0, 7.0), chunk=4) == pytest.approx(math.sqrt(91), rel=1e-7)
    assert norm(torch.ones(3, 2)[:, 0]) == pytest.approx(math.sqrt(3), rel=1e-7)  # not contiguous
    assert norm(torch.tensor([3.0, 4.0], dtype=torch.bfloat16)) == 5.0
    assert norm(torch.full((1024,), 0.5, dtype=torch.bfloat16)) == 16.0
    assert norm(torch.full((900,), 1.25, dtype=torch.bfloat16)) == 37.5
    assert norm(torch.empty(0), torch.tensor(2.0)) == 2.0
    assert norm() == 0.0


def test_what_is_not_finite_is_seen():
    assert math.isnan(norm(torch.ones(3), torch.tensor([1.0, math.nan])))
    assert math.isinf(norm(torch.ones(3), torch.tensor([-math.inf])))
    for value, is_seen in ((math.nan, math.isnan), (math.inf, math.isinf)):
        whole = torch.ones(1000)
        whole[700] = value
        assert is_seen(norm(whole, chunk=300))


def test_neither_small_nor_large_squares_are_lost():
    """In fp32 the square of 1e-30 is 0, and the square of 1e30 is infinite."""
    assert norm(torch.full((4,), 1e-30)) == pytest.approx(2e-30, rel=1e-6)
    assert norm(torch.full((4,), 1e30)) == pytest.approx(2e30, rel=1e-6)
    for size in (1e-30, 1e30):  # of whole rows, and with more chunks than one
        found = norm(torch.full((1000,), size), torch.full((600,), size), chunk=300)
        assert found == pytest.approx(40 * size, rel=1e-6)


@pytest.mark.parametrize(
    ("value", "within"),
    [("normal", 1e-7), (0.1, 1e-7), (0.9298, 6e-7)],
)
def test_parts_have_the_norm_of_the_whole(value, within):
    """Equal elements are the worst case for few accumulators: all round in the same direction."""
    whole = torch.empty(1_600_000)
    if value == "normal":
        whole.normal_(generator=torch.Generator().manual_seed(0))
    else:
        whole.fill_(value)
    exact = float(whole.double().square().sum().sqrt())
    assert norm(whole) == pytest.approx(exact, rel=within)
    assert norm(*whole.split(123_457)) == pytest.approx(exact, rel=within)


UNUSED = (2**16, torch.zeros(1, dtype=torch.int))


@pytest.fixture(autouse=True)
def megatron_as_it_was() -> Iterator[None]:
    before = [(m, m.multi_tensor_scale_impl) for m in (clip_grads, optimizer)]
    norm = clip_grads.l2_norm_impl
    yield
    clip_grads.l2_norm_impl = norm
    for module, scale in before:
        module.multi_tensor_scale_impl = scale


def tensors(*dtypes: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(3, 4), (5,), (1,), (0,)]
    return [torch.randn(size, generator=generator).to(dtype) for dtype in dtypes for size in sizes]


@pytest.mark.parametrize("scale", [1.0, 0.25, -3.0])
def test_scaling_to_others_and_in_place(scale):
    sources, targets = tensors(torch.float32), tensors(torch.bfloat16)
    given = [tensor.clone() for tensor in sources]
    scale_list(*UNUSED, [sources, targets], scale)
    for source, target, before in zip(sources, targets, given, strict=True):
        assert torch.equal(source, before)
        torch.testing.assert_close(target, (scale * source.bfloat16()), rtol=0, atol=0)
    scale_list(*UNUSED, [sources, sources], scale)
    for source, before in zip(sources, given, strict=True):
        assert torch.equal(source, scale * before)
    scale_list(*UNUSED, [[], []], scale)


def test_only_the_loops_are_replaced():
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    optimizer.multi_tensor_scale_impl = of_a_package = object()
    for _ in range(2):
        replace_gradient_loops()
        assert clip_grads.l2_norm_impl is l2_norm_of_list
        assert clip_grads.multi_tensor_scale_impl is scale_list
        assert optimizer.multi_tensor_scale_impl is of_a_package
