"""Experts that are merged before they compute: values, gradients, precision, cost and memory."""

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_parallel.experts.merged import MERGED_AT_ONCE, MergedExperts, merged_linear
from moe_parallel.ops import extension, select_backend
from moe_parallel.parallel import groups_of_one
from moe_parallel.platform.device import multiplies_bf16
from tests.oracles import merging as oracle

E, D, F, T = 4, 5, 6, 3
BACKENDS = ["reference"] + ["native"] * extension.is_built()
MANY = 2 * MERGED_AT_ONCE + 3  # merges, in three batches


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def experts(
    dtype: torch.dtype = torch.float64, d: int = D, f: int = F, e: int = E, backend: str = "auto"
) -> MergedExperts:
    made = MergedExperts(e, d, f, groups_of_one(), select_backend(backend), dtype)
    with torch.no_grad():
        for seed, weight in enumerate(made.parameters()):
            weight.copy_(draw(*weight.shape, seed=seed))
    return made


def routing(merges: int, dtype: torch.dtype = torch.float64, e: int = E) -> torch.Tensor:
    return torch.softmax(draw(merges, e, seed=9, dtype=dtype), dim=1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("merges", [1, MERGED_AT_ONCE, MANY])
def test_each_merged_expert_is_the_oracle_s(merges, backend):
    made, x_PTD, e_PE = experts(backend=backend), draw(merges, T, D, seed=5), routing(merges)
    weights = numpy.broadcast_to(e_PE.numpy()[:, None], (merges, T, E))
    wanted = oracle.merged_output(
        x_PTD.numpy(),
        weights,
        made.w_gate_up_LD2F.detach().numpy(),
        made.w_out_LFD.detach().numpy(),
    )
    numpy.testing.assert_allclose(made(x_PTD, e_PE).detach().numpy(), wanted, rtol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("merges", [2, MANY])
def test_gradients(merges, backend):
    given = [draw(merges, 2, D, seed=5), routing(merges), draw(E, D, F)]
    ops = select_backend(backend)
    assert torch.autograd.gradcheck(merged_linear, [*(x.requires_grad_() for x in given), ops])


@pytest.mark.parametrize("rows_at_once", [None, 1, 4, 100])
def test_bf16_gradients_are_close_to_those_of_fp32(rows_at_once, monkeypatch):
    """Whatever the number of rows in a block, which is larger on a GPU."""
    if rows_at_once is not None:
        module = "moe_parallel.experts.merged"
        monkeypatch.setattr(f"{module}._rows_at_once", lambda w_EIO, dtype: rows_at_once)
    x_PTD, e_PE = draw(MANY, T, D, seed=5).bfloat16(), routing(MANY, torch.float32)
    direction = draw(MANY, T, D, seed=6).bfloat16()
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        made = experts(torch.bfloat16).to(dtype)
        x, e = (leaf.clone().requires_grad_() for leaf in (x_PTD.to(dtype), e_PE))
        (made(x, e) * direction.to(dtype)).sum().backward()
        found.append([x.grad, e.grad, *(weight.grad for weight in made.parameters())])
    for rough, exact in zip(*found, strict=True):
        assert (rough.float() - exact).abs().max() < 0.03 * exact.abs().max()
    assert found[0][1].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_gradients_are_added_to_main_gradients_without_rounding_their_sum(dtype):
    wide = torch.promote_types(dtype, torch.float32)
    x_PTD, e_PE = draw(MANY, T, D, seed=5, dtype=dtype), routing(MANY, wide)
    plain, fused = experts(dtype), experts(dtype)
    for weight in fused.parameters():
        weight.main_grad = torch.ones_like(weight, dtype=wide)
    fused.add_to_main_gradients()
    for made in (plain, fused, fused):  # two micro-batches
        made(x_PTD, e_PE).sum().backward()
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        assert other.grad_added_to_main_grad
        added = (other.main_grad - 1) / 2
        rtol = 1e-12 if dtype == torch.float64 else 2**-8
        torch.testing.assert_close(one.grad.to(wide), added, rtol=rtol, atol=1e-6)
        if dtype == torch.bfloat16:
            assert not torch.equal(added, added.bfloat16().float())


class _Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is created in this context."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.size = max(self.size, made.untyped_storage().nbytes())
        return made


def _largest_and_kept(segments: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the largest tensor of a forward and backward pass, and of those kept between."""
    d, f = 64, 48
    made = experts(dtype, d=d, f=f)
    x_PTD, e_PE = draw(segments, 1, d).to(dtype).requires_grad_(), routing(segments)
    e_PE = e_PE.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with _Largest() as largest, hooks:
        made(x_PTD, e_PE).sum().backward()
    for weight in made.parameters():
        kept.pop(weight.untyped_storage().data_ptr())
    return largest.size, sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_merges_does_not_grow_with_the_number_of_segments(dtype):
    (few, kept_few), (many, kept_many) = (
        _largest_and_kept(lots * MERGED_AT_ONCE, dtype) for lots in (1, 16)
    )
    multiplied = dtype if multiplies_bf16(torch.ones(1)) else torch.float32
    assert many == few == MERGED_AT_ONCE * 64 * 2 * 48 * multiplied.itemsize
    # Per token x, gate and up, SiLU(gate) * up, and e are kept. No matrix is kept.
    row = (64 + 2 * 48 + 48) * dtype.itemsize + E * torch.float32.itemsize
    assert (kept_few, kept_many) == (MERGED_AT_ONCE * row, 16 * MERGED_AT_ONCE * row)
