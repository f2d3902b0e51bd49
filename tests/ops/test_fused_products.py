"""Layers and selection with fused products (gather on load, epilogues), on a GPU, in sizes that the
kernels support; tests/cuda_host runs them too (test_kernels.py). The CPU's own fused products are
in test_fused_on_cpu.py."""

from collections.abc import Iterator

import pytest
import torch

from moe_parallel.ops import extension
from tests.ops.cases import (
    ROUTINGS,
    assert_close,
    assert_no_worse_than_twice,
    float64,
    gradients,
    random_tensor,
)
from tests.ops.test_expert_rows import KINDS, Setting

pytestmark = pytest.mark.covering

DTYPES = [torch.bfloat16, torch.float16]
SIZES = 72, 136, 32  # rows are multiples of 16 bytes
NAMES = ("plain", "empty_experts", "one_token", "dropped_choices", "padded", "many_tokens")
SOME = [routing for routing in ROUTINGS if routing.name in NAMES]


@pytest.fixture(autouse=True)
def fused_wherever_it_can_be(native) -> Iterator[None]:
    module = extension.load()
    before = module.set_fusing(module.Fusing.ALWAYS)
    yield
    module.set_fusing(before)


@pytest.fixture
def step_by_step(fused_wherever_it_can_be):
    """A function; after its call nothing is fused."""
    module = extension.load()
    return lambda: module.set_fusing(module.Fusing.NEVER)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("routing", SOME, ids=str)
def test_layers_are_as_exact_as_step_by_step(
    reference, native, device, routing, kind, dtype, step_by_step
):
    setting = Setting(routing, dtype, device, SIZES)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in setting.inputs(kind)]
    exact_y = setting.compute(reference, kind, *exact_inputs)
    exact = [exact_y, *gradients(exact_y, setting.dy.double(), *exact_inputs)]

    fused = setting.passes(native, kind)
    step_by_step()
    for found, steps, wanted in zip(fused, setting.passes(native, kind), exact, strict=True):
        assert found.dtype == steps.dtype
        assert_no_worse_than_twice(found, steps, float64(wanted))


@pytest.mark.parametrize("keep", ["nothing", "chosen", "all"])
@pytest.mark.parametrize("tokens, experts, rank, k", [(1, 2, 32, 1), (150, 9, 96, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_choices(native, device, dtype, tokens, experts, rank, k, keep):
    x = random_tensor(tokens, 72, dtype=dtype, device=device, seed=0).requires_grad_()
    w = random_tensor(experts, 72, rank, dtype=dtype, device=device, seed=1).requires_grad_()
    norms, chosen, c = native.norm_topk(x, w, k, keep=keep)
    exact_c = torch.einsum("td,edr->ter", x.double(), w.double())
    exact = exact_c.norm(dim=-1)
    assert_close(norms, float64(exact), dtype)
    assert torch.equal(chosen, norms.topk(k).indices)
    if c is not None:
        of_chosen = exact_c.gather(1, chosen[:, :, None].expand(-1, -1, rank))
        assert_close(c, float64(of_chosen), dtype)
    dnorms = random_tensor(tokens, experts, dtype=torch.float32, device=device, seed=2)
    for found, wanted in zip(
        gradients(norms, dnorms, x, w), gradients(exact, dnorms.double(), x, w), strict=True
    ):
        assert_close(found, float64(wanted), dtype)
