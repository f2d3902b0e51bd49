"""Expert weights mark the gradients that the operators have already added, for Megatron-Core."""

import pytest
import torch

from tests.experts.test_experts import BACKENDS, COUNTS, KINDS, D, E, R, alone, compute


def experts_of(kind: str, backend: str, main: bool):
    """Experts with random weights; if `main`, with main gradients of ones."""
    experts = KINDS[kind](alone(), backend)
    generator = torch.Generator().manual_seed(5)
    for weight in experts.parameters():
        with torch.no_grad():
            weight.normal_(generator=generator)
        if main:
            weight.main_grad = torch.ones_like(weight)
            weight.grad_added_to_main_grad = False
    if main:
        experts.add_to_main_gradients()
    return experts


def backward(experts, kind: str) -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(sum(COUNTS), D, dtype=torch.float64, generator=generator)
    w_down = torch.randn(E, D, R, dtype=torch.float64, generator=generator)
    y = compute(experts, kind, x, torch.rand(len(x), generator=generator), COUNTS, w_down)
    (y * torch.linspace(-1, 1, D, dtype=torch.float64)).sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_added_and_marked(kind, backend):
    plain, fused = experts_of(kind, backend, main=False), experts_of(kind, backend, main=True)
    backward(plain, kind)
    for _ in range(2):  # micro-batches; between them the hook drops weight.grad
        backward(fused, kind)
        for weight in fused.parameters():
            assert weight.grad.shape == weight.shape  # it exists, but its values have no meaning
            assert weight.grad_added_to_main_grad
            weight.grad = None
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(other.main_grad, 1 + 2 * one.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_added_all_the_same_is_zero(kind):
    experts = experts_of(kind, BACKENDS[-1], main=True)
    for weight in experts.parameters():
        weight.zero_out_wgrad = True
    backward(experts, kind)
    for weight in experts.parameters():
        assert not weight.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_nothing_is_added(kind):
    experts = experts_of(kind, BACKENDS[-1], main=True)
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        backward(experts, kind)
    for weight in experts.parameters():
        assert (weight.main_grad == 1).all() and not weight.grad_added_to_main_grad
