import numpy as np
import pytest
import torch

from tests.ops.cases import DTYPES, LAYOUTS, assert_close, float64, random_tensor

pytestmark = pytest.mark.covering

LARGE = (128, 160, 96)  # more than 2^20 multiplications, which oneDNN takes in fp32


def factors(sizes, dtype, device, batch=()):
    rows, inner, columns = sizes
    a = random_tensor(*batch, rows, inner, dtype=dtype, device=device, seed=0)
    b = random_tensor(*batch, inner, columns, dtype=dtype, device=device, seed=1)
    return a, b


def wanted(a, b):
    return np.einsum("...ni,...io->...no", float64(a), float64(b))


def between_columns(rows, columns, value, device, dtype=torch.float32):
    """A matrix whose outer columns are 7, and a view of the others, which have the value."""
    memory = torch.full((rows, columns + 9), value, device=device, dtype=dtype)
    memory[:, :4] = memory[:, -5:] = 7
    return memory, memory[:, 4:-5]


def outside_is_kept(memory):
    return bool((memory[:, :4] == 7).all()) and bool((memory[:, -5:] == 7).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 5, 3), (0, 4, 2), LARGE], ids=str)
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_equals_the_oracle(ops, device, sizes, dtype, batch):
    a, b = factors(sizes, dtype, device, batch)
    y = ops.product(a, b)
    assert y.dtype == dtype and not y.requires_grad
    assert_close(y, wanted(a, b), dtype)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(7, 5, 3), LARGE], ids=str)
def test_each_library_writes_the_rows_of_out_and_nothing_else(
    library, native, device, layout, sizes, accumulate
):
    a, b = (LAYOUTS[layout](each) for each in factors(sizes, torch.float32, device))
    rows, _, columns = sizes
    memory, out = between_columns(rows, columns, 0.5 if accumulate else torch.nan, device)
    assert native.product(a, b, out, accumulate=accumulate) is out
    assert_close(out, wanted(a, b) + 0.5 * accumulate, torch.float32)
    assert outside_is_kept(memory)


#: Blocks of 512 rows, 1,024 and 256 columns, and ends that fill no block.
WIDE = [(1, 1, 1), (7, 5, 3), (96, 33, 40), (1030, 513, 270), (130, 1100, 300)]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", WIDE, ids=str)
def test_a_wider_out_is_not_rounded(library, ops, device, sizes, dtype, accumulate):
    """As the gradient of a weight: a is a transposed view, out has gaps between its rows."""
    rows, inner, columns = sizes
    a = random_tensor(inner, rows, dtype=dtype, device=device, seed=0).t()
    b = random_tensor(inner, columns, dtype=dtype, device=device, seed=1)
    memory, out = between_columns(rows, columns, 0.5 if accumulate else torch.nan, device)
    assert ops.product(a, b, out, accumulate=accumulate) is out
    assert_close(out, wanted(a, b) + 0.5 * accumulate, torch.float32)
    assert outside_is_kept(memory)


def test_a_wider_out_keeps_what_is_not_finite_in_its_row(library, native, device):
    """The rows that fill up a block are zeros, and so is what they are multiplied by."""
    a = torch.ones(33, 8, dtype=torch.bfloat16, device=device)
    a[32, 3] = torch.inf
    b = torch.ones(33, 5, dtype=torch.bfloat16, device=device)
    out = torch.zeros(8, 5, device=device)
    native.product(a.t(), b, out, accumulate=True)
    assert bool((out[3] == torch.inf).all())
    out[3] = 33
    assert bool((out == 33).all())


of_layers = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@of_layers
def test_what_is_not_finite_stays_in_its_row(library, native, dtype):
    """And what lies between the rows is not read."""
    rows, inner, columns = LARGE
    wide, b = factors((rows, inner + 32, columns), dtype, "cpu")
    wide[:, inner:] = torch.inf
    wide[7, 5] = torch.inf
    y = native.product(wide[:, :inner], b[:inner])
    assert not bool(y[7].isfinite().any())
    y[7] = 0
    assert bool(y.isfinite().all())
