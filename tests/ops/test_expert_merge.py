import pytest
import torch

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

# merges, experts, inner, outer
SHAPES = [(1, 1, 1, 1), (2, 4, 5, 7), (9, 3, 16, 33), (0, 3, 2, 2), (3, 8, 70, 90), (2, 3, 0, 4)]


def setting(shape: tuple[int, ...], dtype: torch.dtype, device: str):
    merges, experts, inner, outer = shape
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = random_tensor(merges, experts, dtype=wide, device=device, seed=0)
    w = random_tensor(experts, inner, outer, dtype=dtype, device=device, seed=1)
    dmerged = random_tensor(merges, inner, outer, dtype=dtype, device=device, seed=2)
    return weights.requires_grad_(), w.requires_grad_(), dmerged


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_oracle(ops, device, shape, dtype):
    weights, w, dmerged = setting(shape, dtype, device)
    merged = ops.expert_merge(weights, w)
    assert merged.dtype == dtype
    assert_close(merged, oracle.expert_merge(float64(weights), float64(w)), dtype)
    found = gradients(merged, dmerged, weights, w)
    wanted = oracle.expert_merge_gradient(float64(dmerged), float64(weights), float64(w))
    for actual, expected, tensor in zip(found, wanted, (weights, w), strict=True):
        assert actual.dtype == tensor.dtype
        assert_close(actual, expected, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_inputs_and_gradients(ops, device, layout):
    weights, w, dmerged = setting((2, 3, 4, 6), torch.float64, device)
    relaid = LAYOUTS[layout]
    found = gradients(ops.expert_merge(relaid(weights), relaid(w)), relaid(dmerged), weights, w)
    wanted = oracle.expert_merge_gradient(float64(dmerged), float64(weights), float64(w))
    for actual, expected in zip(found, wanted, strict=True):
        assert_close(actual, expected, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_experts_stay_as_they_are(ops, device, dtype):
    """If the weights sum to 1, equal experts stay the same to the bit, as after a dense warm-up."""
    one = random_tensor(1, 31, 65, dtype=dtype, device=device, seed=0)
    weights = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64, device=device)
    merged = ops.expert_merge(weights, one.expand(3, -1, -1))
    assert torch.equal(merged, one)


def test_gradcheck(ops, device):
    weights, w, _ = setting((2, 3, 2, 4), torch.float64, device)
    assert torch.autograd.gradcheck(ops.expert_merge, (weights, w))


def test_bf16_is_as_exact_as_torchs(reference, native, device):
    weights, w, dmerged = setting((4, 5, 33, 65), torch.bfloat16, device)
    inputs = float64(weights), float64(w)
    exact = [oracle.expert_merge(*inputs), *oracle.expert_merge_gradient(float64(dmerged), *inputs)]
    results = []
    for ops in (native, reference):
        merged = ops.expert_merge(weights, w)
        results.append([merged, *gradients(merged, dmerged, weights, w)])
    for of_native, of_reference, wanted in zip(*results, exact, strict=True):
        assert_no_worse_than_twice(of_native, of_reference, wanted)


def test_threads_do_not_change_a_bit(native, two_threads):
    weights, w, dmerged = setting((3, 4, 100, 90), torch.float32, "cpu")
    merged = native.expert_merge(weights, w)
    of_two = [merged, *gradients(merged, dmerged, weights, w)]
    torch.set_num_threads(1)
    merged = native.expert_merge(weights, w)
    for two, one in zip(of_two, [merged, *gradients(merged, dmerged, weights, w)], strict=True):
        assert torch.equal(two, one)


def test_other_shapes_are_refused(native, device):
    weights, w, _ = setting((2, 3, 4, 6), torch.float32, device)
    with pytest.raises(ValueError, match="weights are for 2 experts, w has 3"):
        native.expert_merge(weights[:, 1:], w)
