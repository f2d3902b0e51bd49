import numpy as np
import pytest
import torch

from moe_parallel.ops import extension
from tests.ops.cases import (
    DTYPES,
    LAYOUTS,
    assert_close,
    assert_no_worse_than_twice,
    float64,
    gradients,
    random_tensor,
)
from tests.oracles import ops as oracle

pytestmark = pytest.mark.covering

COUNTS = {
    "plain": [3, 5, 2],
    "empty_experts": [0, 4, 0, 1, 0],
    "all_to_one": [0, 0, 17],
    "one_row": [0, 1],
    "one_expert": [7],
    "no_rows": [0, 0, 0],
    "many_experts": [n % 4 for n in range(33)],
}


def setting(counts: list[int], inner: int, outer: int, dtype: torch.dtype, device: str):
    x = random_tensor(sum(counts), inner, dtype=dtype, device=device, seed=0)
    w = random_tensor(len(counts), inner, outer, dtype=dtype, device=device, seed=1)
    dy = random_tensor(sum(counts), outer, dtype=dtype, device=device, seed=2)
    return x.requires_grad_(), w.requires_grad_(), torch.tensor(counts, device=device), dy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner, outer", [(1, 1), (7, 5), (16, 33)])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_equals_the_oracle(ops, device, counts, inner, outer, dtype):
    x, w, counts_E, dy = setting(counts, inner, outer, dtype, device)
    y = ops.grouped_gemm(x, w, counts_E)
    assert y.dtype == dtype
    assert_close(y, oracle.grouped_gemm(float64(x), float64(w), counts), dtype)
    dx, dw = gradients(y, dy, x, w)
    wanted = oracle.grouped_gemm_gradient(float64(dy), float64(x), float64(w), counts)
    assert_close(dx, wanted[0], dtype)
    assert_close(dw, wanted[1], dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_inputs_and_gradients(ops, device, layout):
    x, w, counts_E, dy = setting([3, 0, 5], 6, 4, torch.float64, device)
    relaid = LAYOUTS[layout]
    y = ops.grouped_gemm(relaid(x), relaid(w), counts_E)
    wanted = oracle.grouped_gemm(float64(x), float64(w), [3, 0, 5])
    assert_close(y, wanted, torch.float64)
    dx, dw = gradients(y, relaid(dy), x, w)
    wanted = oracle.grouped_gemm_gradient(float64(dy), float64(x), float64(w), [3, 0, 5])
    assert_close(dx, wanted[0], torch.float64)
    assert_close(dw, wanted[1], torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expanded_gradient(ops, device, dtype):
    x, w, counts_E, dy = setting([3, 0, 5], 6, 4, dtype, device)
    dx, dw = torch.autograd.grad(ops.grouped_gemm(x, w, counts_E).sum(), (x, w))
    ones = float64(torch.ones_like(dy))
    wanted = oracle.grouped_gemm_gradient(ones, float64(x), float64(w), [3, 0, 5])
    assert_close(dx, wanted[0], dtype)
    assert_close(dw, wanted[1], dtype)


def test_gradcheck(ops, device):
    x, w, counts_E, _ = setting([2, 0, 3], 3, 2, torch.float64, device)
    assert torch.autograd.gradcheck(lambda x, w: ops.grouped_gemm(x, w, counts_E), (x, w))
    assert torch.autograd.gradgradcheck(lambda x, w: ops.grouped_gemm(x, w, counts_E), (x, w))


def test_only_the_wanted_gradient(ops, device):
    x, w, counts_E, dy = setting([3, 0, 5], 6, 4, torch.float64, device)
    wanted = oracle.grouped_gemm_gradient(float64(dy), float64(x), float64(w), [3, 0, 5])
    (dx,) = gradients(ops.grouped_gemm(x, w.detach(), counts_E), dy, x)
    assert_close(dx, wanted[0], torch.float64)
    (dw,) = gradients(ops.grouped_gemm(x.detach(), w, counts_E), dy, w)
    assert_close(dw, wanted[1], torch.float64)


def test_bf16_is_as_exact_as_torchs(reference, native, device):
    counts = [40, 0, 77, 3]
    x, w, counts_E, dy = setting(counts, 65, 34, torch.bfloat16, device)
    exact = [
        oracle.grouped_gemm(float64(x), float64(w), counts),
        *oracle.grouped_gemm_gradient(float64(dy), float64(x), float64(w), counts),
    ]
    results = []
    for ops in (native, reference):
        y = ops.grouped_gemm(x, w, counts_E)
        results.append([y, *gradients(y, dy, x, w)])
    for of_native, of_reference, wanted in zip(*results, exact, strict=True):
        assert_no_worse_than_twice(of_native, of_reference, wanted)


# Sizes in multiples of 16 bytes, as tensor cores need; more and fewer rows than in a tile.
TILED_COUNTS = {
    "several_tiles": [300, 0, 5, 128, 129],
    "all_to_one": [0, 0, 260],
    "many_experts": [n * 7 % 50 for n in range(64)],
}
TILED_ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 2e-3}  # tf32


@pytest.fixture
def tf32_allowed():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def tiling(request):
    """The tiles of grouped products in bf16 on Hopper."""
    module = extension.load()
    before = module.set_tiling(getattr(module.Tiling, request.param))
    yield request.param
    module.set_tiling(before)


def assert_rounded(actual: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    difference = (actual.double() - wanted).abs().max()
    assert difference <= TILED_ROUNDING[dtype] * wanted.abs().max()


@pytest.mark.parametrize("dtype", TILED_ROUNDING, ids=str)
@pytest.mark.parametrize("inner, outer", [(72, 136), (256, 128)])
@pytest.mark.parametrize("counts", TILED_COUNTS.values(), ids=TILED_COUNTS.keys())
def test_sizes_of_tensor_cores(native, device, tf32_allowed, counts, inner, outer, dtype):
    check_tensor_cores(native, device, counts, inner, outer, dtype)


@pytest.mark.parametrize("tiling", ["SQUARE", "WIDE", "NARROW"], indirect=True)
@pytest.mark.parametrize("inner, outer", [(64, 520), (520, 64), (256, 264), (72, 136)])
@pytest.mark.parametrize("counts", TILED_COUNTS.values(), ids=TILED_COUNTS.keys())
def test_every_tile_of_tensor_cores(native, device, tiling, counts, inner, outer):
    check_tensor_cores(native, device, counts, inner, outer, torch.bfloat16)


def check_tensor_cores(native, device, counts, inner, outer, dtype) -> None:
    """y, dx, dw and a main gradient against products of each group in fp64."""
    x, w, counts_E, dy = setting(counts, inner, outer, dtype, device)
    wide_x, wide_w, wide_dy = (tensor.detach().double() for tensor in (x, w, dy))
    groups = list(zip(wide_x.split(counts), wide_dy.split(counts), wide_w, strict=True))
    y = native.grouped_gemm(x, w, counts_E)
    assert_rounded(y, torch.cat([x_G @ w_IO for x_G, _, w_IO in groups]), dtype)
    dx, dw = gradients(y, dy, x, w)
    assert_rounded(dx, torch.cat([dy_G @ w_IO.t() for _, dy_G, w_IO in groups]), dtype)
    products = torch.stack([x_G.t() @ dy_G for x_G, dy_G, _ in groups])
    assert_rounded(dw, products, dtype)
    assert not dw[counts_E == 0].any()

    total = torch.ones(products.shape, device=device)  # a main gradient
    torch.ops.moe_parallel.grouped_outer_add(total, x.detach(), dy, counts_E)
    assert_rounded(total, products + 1, dtype)
    assert (total[counts_E == 0] == 1).all()


@pytest.mark.parametrize("device", ["cpu"])  # on a GPU the host does not wait for the counts
def test_counts_that_do_not_fit_are_refused(ops, device):
    x, w, counts_E, _ = setting([3, 0, 5], 6, 4, torch.float32, device)
    with pytest.raises(ValueError, match="sum to"):
        ops.grouped_gemm(x, w, counts_E + 1)
    with pytest.raises(ValueError, match="3 experts"):
        ops.grouped_gemm(x, w, torch.tensor([3, 5]))


@pytest.mark.parametrize("total_dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_a_weight_gradient_is_added_to_a_main_gradient(native, device, counts, total_dtype):
    """In place, and in the type of the main gradient; without rows it stays unchanged."""
    dtype = torch.float64 if total_dtype == torch.float64 else torch.bfloat16
    x, _, counts_E, dy = setting(counts, 7, 5, dtype, device)
    total = random_tensor(len(counts), 7, 5, dtype=total_dtype, device=device, seed=3)
    before, data = float64(total).copy(), total.data_ptr()
    w = np.zeros((len(counts), 7, 5))
    torch.ops.moe_parallel.grouped_outer_add(total, x.detach(), dy, counts_E)
    _, dw = oracle.grouped_gemm_gradient(float64(dy), float64(x), w, counts)
    assert total.data_ptr() == data and total.dtype == total_dtype
    assert_close(total, before + dw, dtype)
    idle = [e for e, count in enumerate(counts) if count == 0]
    assert (float64(total)[idle] == before[idle]).all()


def test_a_main_gradient_of_another_shape_is_refused(native, device):
    x, _, counts_E, dy = setting([3, 0, 5], 6, 4, torch.float32, device)
    with pytest.raises(ValueError, match=r"total must have shape \[3, 6, 4\], not \[3, 4, 6\]"):
        torch.ops.moe_parallel.grouped_outer_add(
            torch.zeros(3, 4, 6, device=device), x.detach(), dy, counts_E
        )
