import numpy as np
import pytest
import torch

from tests.ops.cases import assert_close, float64, gradients, random_tensor
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


def assert_rounded(actual: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    difference = (actual.double() - wanted).abs().max()
    assert difference <= TILED_ROUNDING[dtype] * wanted.abs().max()


@pytest.mark.parametrize("dtype", TILED_ROUNDING, ids=str)
# On Hopper wide tiles compute few columns, narrow ones a low rank, square ones the rest.
@pytest.mark.parametrize("inner, outer", [(72, 136), (64, 520), (520, 64), (256, 264), (896, 896)])
@pytest.mark.parametrize("counts", TILED_COUNTS.values(), ids=TILED_COUNTS.keys())
def test_sizes_of_tensor_cores(native, device, tf32_allowed, counts, inner, outer, dtype):
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
