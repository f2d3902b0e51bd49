"""Weight gradients added to main gradients equal separate ones, or are more exact."""

import pytest
import torch
from torch import Tensor

from moe_parallel.ops import Ops
from tests.ops.cases import BY_NAME, ROUTINGS, assert_close, float64, random_tensor
from tests.ops.test_expert_rows import KINDS, Setting, cases

pytestmark = pytest.mark.covering

#: The place of the first weight among the inputs that has a main gradient.
FIRST = {"routed": 2, "with norms": 2}
PASSES = 3  # micro-batches; all forward passes precede the first backward pass, as in a pipeline


def weights(setting: Setting, kind: str) -> tuple[Tensor, ...]:
    """The weights that have main gradients: all except W_down."""
    return setting.inputs(kind)[FIRST.get(kind, 3) :]


def others(setting: Setting, kind: str) -> tuple[Tensor, ...]:
    return setting.inputs(kind)[: FIRST.get(kind, 3)]


def starts(setting: Setting, kind: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The initial values of the main gradients."""
    return tuple(
        random_tensor(*w.shape, dtype=dtype, device=setting.device, seed=20 + i)
        for i, w in enumerate(weights(setting, kind))
    )


def upstream(setting: Setting) -> list[Tensor]:
    shape, device = setting.dy.shape, setting.device
    return [
        random_tensor(*shape, dtype=setting.dtype, device=device, seed=30 + i)
        for i in range(PASSES)
    ]


def added(ops: Ops, setting: Setting, kind: str, main: tuple[Tensor, ...]) -> list[Tensor]:
    """Add the gradients of all passes to `main`; returns the summed gradients of `others`."""
    outputs = [setting.compute(ops, kind, main_gradients=main) for _ in range(PASSES)]
    sums = [torch.zeros_like(tensor) for tensor in others(setting, kind)]
    for y, dy in zip(outputs, upstream(setting), strict=True):
        found = torch.autograd.grad(y, setting.inputs(kind), dy, allow_unused=True)
        assert all(gradient is None for gradient in found[len(sums) :])
        for total, gradient in zip(sums, found[: len(sums)], strict=True):
            total += gradient
    return sums


def unfused(ops: Ops, setting: Setting, kind: str) -> list[list[Tensor]]:
    """The gradients of all inputs in each pass."""
    return [
        list(torch.autograd.grad(setting.compute(ops, kind), setting.inputs(kind), dy))
        for dy in upstream(setting)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("routing", "kind"), cases(ROUTINGS), ids=str)
def test_equals_the_sum_of_gradients(ops, device, routing, kind, dtype):
    setting = Setting(routing, dtype, device)
    main = starts(setting, kind, dtype)
    wanted = [torch.zeros_like(tensor) for tensor in others(setting, kind)] + list(
        map(torch.clone, main)
    )
    for gradients in unfused(ops, setting, kind):
        for total, gradient in zip(wanted, gradients, strict=True):
            total += gradient
    found = [*added(ops, setting, kind, main), *main]
    for actual, expected in zip(found, wanted, strict=True):
        assert_close(actual, float64(expected), dtype, rounded=2)


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_without_rows_keeps_its_sum(ops, device, kind):
    setting = Setting(BY_NAME["empty_experts"], torch.float32, device)
    main = starts(setting, kind, torch.float32)
    before = [total.clone() for total in main]
    added(ops, setting, kind, main)
    idle = sorted(set(range(setting.routing.num_experts)) - set(setting.routing.experts.flat))
    assert idle
    for total, start in zip(main, before, strict=True):
        assert torch.equal(total[idle], start[idle])
        assert not torch.equal(total, start)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_short_types_are_not_rounded(native, device, dtype):
    """1 + 2^-12 is between two numbers of either type: an fp32 sum represents it exactly."""
    x = torch.tensor([[1.0], [2.0**-12]], dtype=dtype, device=device)
    total = torch.zeros(1, 1, 8, device=device)
    ones = torch.ones(2, 8, dtype=dtype, device=device)
    counts = torch.tensor([2], device=device)
    torch.ops.moe_parallel.grouped_outer_add(total, x, ones, counts)
    assert torch.equal(total, torch.full_like(total, 1 + 2.0**-12))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "routed"])
def test_of_experts_padded_for_tensor_cores(native, kind, monkeypatch):
    """A GPU computes 16-bit experts with columns up to the next multiple of 8."""
    setting = Setting(ROUTINGS[0], torch.float64, "cpu")
    width = weights(setting, kind)[0].size(2)
    assert width % 8 != 0
    wanted = starts(setting, kind, torch.float64)
    expected = added(native, setting, kind, wanted)
    separate = unfused(native, setting, kind)

    missing = "moe_parallel.ops.padding.missing_columns"
    monkeypatch.setattr(missing, lambda x, width: -width % 8)
    found = starts(setting, kind, torch.float64)
    for actual, exact in zip(added(native, setting, kind, found), expected, strict=True):
        assert_close(actual, float64(exact), torch.float64)
    for actual, exact in zip(found, wanted, strict=True):
        assert_close(actual, float64(exact), torch.float64)
    for actual, exact in zip(unfused(native, setting, kind), separate, strict=True):
        for one, other in zip(actual, exact, strict=True):
            assert_close(one, float64(other), torch.float64)
