"""Experts that are merged before they compute: values, gradients, precision, cost and memory."""

from dataclasses import fields
from typing import Any

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from moe_parallel.experts.experts import SwiGLUExperts
from moe_parallel.experts.merged import MERGED_AT_ONCE, MergedExperts, merged_linear
from moe_parallel.ops import extension, select_backend
from moe_parallel.parallel import Groups
from moe_parallel.platform.device import multiplies_bf16
from tests.layers.single import SingleRank
from tests.oracles import merging as oracle

E, D, F, T = 4, 5, 6, 3
BACKENDS = ["reference"] + ["native"] * extension.is_built()
MANY = 2 * MERGED_AT_ONCE + 3  # merges, in three batches


def alone() -> Any:
    return Groups(*[SingleRank()] * len(fields(Groups)))  # type: ignore[list-item]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def experts(
    dtype: torch.dtype = torch.float64,
    d: int = D,
    f: int = F,
    e: int = E,
    backend: str = "auto",
) -> MergedExperts:
    made = MergedExperts(e, d, f, alone(), select_backend(backend), dtype)
    with torch.no_grad():
        for seed, weight in enumerate(made.parameters()):
            weight.copy_(draw(*weight.shape, seed=seed))
    return made


def routing(merges: int, dtype: torch.dtype = torch.float64, e: int = E) -> torch.Tensor:
    return torch.softmax(draw(merges, e, seed=9, dtype=dtype), dim=1)


def test_weights_are_named_and_shaped_as_those_of_routed_experts():
    routed = SwiGLUExperts(E, D, F, alone(), select_backend("reference"), torch.float64)
    shapes = {name: weight.shape for name, weight in routed.named_parameters()}
    assert {name: weight.shape for name, weight in experts().named_parameters()} == shapes


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_hot_merging_is_that_expert(backend):
    merge = select_backend(backend).expert_merge
    w_EIO = draw(E, D, F, dtype=torch.float32)
    assert merge(torch.eye(E), w_EIO).equal(w_EIO)
    assert merge(torch.eye(E), w_EIO.bfloat16()).equal(w_EIO.bfloat16())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_equal_bf16_experts_merge_to_themselves_bit_for_bit(rows, backend):
    """Therefore a model whose dense layers have become its experts computes what it did before."""
    merge = select_backend(backend).expert_merge
    w_IO = draw(rows, F, dtype=torch.bfloat16)
    merged_CIO = merge(routing(MANY, torch.float32), w_IO.expand(E, -1, -1))
    assert merged_CIO.equal(w_IO.expand(MANY, -1, -1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_is_rounded_once(backend):
    """Weights of 1/3, or sums in bf16, would be off by several units in the last place."""
    merge = select_backend(backend).expert_merge
    e_PE, w_EIO = routing(MANY, torch.float32), draw(E, D, F, dtype=torch.bfloat16)
    exact_CIO = (e_PE.double() @ w_EIO.double().flatten(1)).view(MANY, D, F)
    merged_CIO = merge(e_PE, w_EIO)
    assert merged_CIO.dtype == torch.bfloat16
    assert (merged_CIO == exact_CIO.bfloat16()).float().mean() > 0.99


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


@pytest.mark.parametrize("e, tokens", [(4, 8), (8, 256), (32, 256)])
def test_merging_costs_e_over_t_of_the_layer(e, tokens):
    """Lory, Appendix B: 3.1% with 8 experts and segments of 256 tokens, 12.5% with 32."""
    made = experts(torch.float32, e=e, backend="reference")  # its products can be counted
    x_PTD = draw(3, tokens, D, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        made(x_PTD, routing(3, torch.float32, e))
    layer = 6 * 3 * tokens * D * F
    assert counter.get_total_flops() - layer == pytest.approx(layer * e / tokens)


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
