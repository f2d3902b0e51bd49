import numpy as np
import pytest
import torch

from tests.ops.cases import DTYPES, assert_close, float64, random_tensor
from tests.oracles import ops as oracle

pytestmark = pytest.mark.covering

SHAPES = [(1, 1), (5, 7), (3, 64), (9, 131), (0, 4), (130, 33)]


def setting(rows: int, width: int, dtype: torch.dtype, device: str):
    """Logits and labels. The last label of several is not one of the columns."""
    logits = 4 * random_tensor(rows, width, dtype=dtype, device=device, seed=0)
    labels = torch.arange(3, 3 + 5 * rows, 5, device=device) % width
    labels[1:][-1:] = width
    return logits, labels


def one_hot(labels: torch.Tensor, width: int) -> np.ndarray:
    return labels.cpu().numpy()[:, None] == np.arange(width)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_oracle(ops, device, shape, dtype):
    logits, labels = setting(*shape, dtype, device)
    given = float64(logits).copy()
    wide = torch.promote_types(dtype, torch.float32)
    most, sums = ops.softmax_sums(logits)
    assert most.dtype == sums.dtype == wide
    assert (float64(most) == given.max(1, initial=-np.inf)).all()
    assert_close(sums, np.exp(given).sum(1) / np.exp(float64(most)), wide)
    assert (float64(logits) == given).all()
    ops.softmax_gradient(logits, labels, most, sums)
    assert_close(logits, oracle.softmax(given) - one_hot(labels, shape[1]), dtype)


@pytest.mark.parametrize("width", [2, 19, 64])
def test_worked_by_hand(ops, device, width):
    """Weights 1 and 3; all other logits are so small that they have none."""
    logits = torch.full((2, width), -1e4, device=device)
    logits[:, 0], logits[:, -1] = -1000.0, -1000.0 + float(np.log(3))
    most, sums = ops.softmax_sums(logits)
    torch.testing.assert_close(sums, torch.full((2,), 4 / 3, device=device), rtol=1e-4, atol=0)
    ops.softmax_gradient(logits, torch.tensor([width - 1, -1], device=device), most, sums)
    wanted = torch.zeros(2, width, device=device)
    wanted[:, 0] = 0.25
    wanted[0, -1], wanted[1, -1] = -0.25, 0.75
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-30)


def test_large_logits_do_not_overflow(ops, device):
    logits = torch.tensor([[3e38, -3e38, 3e38]], device=device)
    most, sums = ops.softmax_sums(logits)
    assert sums.tolist() == [2.0]
    ops.softmax_gradient(logits, torch.tensor([0], device=device), most, sums)
    assert logits[0, 0] == -0.5 and logits[0, 2] == 0.5 and 0 <= logits[0, 1] < 1e-30


@pytest.mark.parametrize("place", [0, 18])
def test_not_a_number_stays_in_its_row(ops, device, place):
    logits = torch.zeros(3, 19, device=device)
    logits[1, place] = torch.nan
    most, sums = ops.softmax_sums(logits)
    ops.softmax_gradient(logits, torch.tensor([0, 1, 2], device=device), most, sums)
    assert logits[1].isnan().all() and logits[0].isfinite().all() and logits[2].isfinite().all()


def test_the_gradient_in_bf16_is_rounded_once(native):
    logits, labels = setting(50, 70, torch.bfloat16, "cpu")
    p = oracle.softmax(float64(logits)) - one_hot(labels, 70)
    native.softmax_gradient(logits, labels, *native.softmax_sums(logits))
    assert (np.abs(float64(logits) - p) <= np.abs(p) * 2.0**-8 * 1.001).all()


def test_sums_of_rows_with_gaps(native):
    logits, _ = setting(6, 40, torch.float32, "cpu")
    for each, other in zip(
        native.softmax_sums(logits[:, 5:]), native.softmax_sums(logits[:, 5:].clone()), strict=True
    ):
        assert torch.equal(each, other)


def test_threads_do_not_change_a_bit(native, two_threads):
    results = []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        logits, labels = setting(300, 513, torch.float32, "cpu")
        most, sums = native.softmax_sums(logits)
        native.softmax_gradient(logits, labels, most, sums)
        results.append((most, sums, logits))
    for two, one in zip(*results, strict=True):
        assert torch.equal(two, one)


def test_other_shapes_are_refused(native):
    logits, labels = setting(5, 7, torch.float32, "cpu")
    most, sums = native.softmax_sums(logits)
    with pytest.raises(ValueError, match="logits must have 2 dimensions"):
        native.softmax_sums(logits[0])
    with pytest.raises(ValueError, match="logits have no columns"):
        native.softmax_sums(logits[:, :0])
    with pytest.raises(ValueError, match="logits must be contiguous"):
        native.softmax_gradient(logits[:, 1:], labels, most, sums)
    with pytest.raises(ValueError, match=r"labels must have shape \[5\], not \[4\]"):
        native.softmax_gradient(logits, labels[1:], most, sums)
    with pytest.raises(ValueError, match=r"most must have shape \[5\], not \[4\]"):
        native.softmax_gradient(logits, labels, most[1:], sums)
    with pytest.raises(TypeError, match="labels must be int64"):
        native.softmax_gradient(logits, labels.int(), most, sums)
    with pytest.raises(TypeError, match="sums must be Float for Float, not Double"):
        native.softmax_gradient(logits, labels, most, sums.double())
