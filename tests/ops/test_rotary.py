import math

import numpy as np
import pytest
import torch

from tests.ops.cases import DTYPES, assert_close, float64, random_tensor

pytestmark = pytest.mark.covering

#: Tokens, sequences, heads of queries and of keys, width of a head.
SHAPES = [(1, 1, 1, 1, 2), (5, 2, 4, 2, 6), (3, 1, 2, 1, 64), (7, 3, 3, 3, 34), (0, 2, 2, 1, 8)]


def angles_of(length: int, batch: int, width: int, device: str) -> torch.Tensor:
    """Angles in Megatron-Core's layout, far beyond a whole turn: [length, batch, 1, width]."""
    half = 40 * random_tensor(
        length, batch, 1, width // 2, dtype=torch.float32, device=device, seed=0
    )
    return torch.cat([half, half], dim=-1)


def setting(shape: tuple[int, ...], dtype: torch.dtype, device: str, batch: int | None = None):
    """q, k and the angles; with `batch`, sequences that have their own angles."""
    length, sequences, heads, groups, width = shape
    q = random_tensor(length, sequences, heads, width, dtype=dtype, device=device, seed=1)
    k = random_tensor(length, sequences, groups, width, dtype=dtype, device=device, seed=2)
    return q, k, angles_of(length, batch or 1, width, device)


def turned(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Each pair as a complex number, times e^(i angle)."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    pairs = pairs * np.exp(1j * angles[..., :half])
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_products_of_complex_numbers(ops, device, shape, dtype):
    q, k, angles = setting(shape, dtype, device)
    for x, y in zip((q, k), ops.rotary(q, k, angles), strict=True):
        assert y.dtype == dtype and y.is_contiguous()
        assert_close(y, turned(float64(x), float64(angles)), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sequences_with_their_own_angles(ops, device, dtype):
    q, k, angles = setting((5, 3, 2, 1, 16), dtype, device, batch=3)
    for x, y in zip((q, k), ops.rotary(q, k, angles), strict=True):
        assert_close(y, turned(float64(x), float64(angles)), dtype)


def test_a_quarter_turn_by_hand(ops, device):
    q = torch.tensor([1.0, 2, 3, 4], device=device).view(1, 1, 1, 4)
    angles = torch.tensor([math.pi / 2, 0] * 2, device=device).view(1, 1, 1, 4)
    y, z = ops.rotary(q, 10 * q, angles)
    wanted = torch.tensor([-3.0, 2, 1, 4], device=device)
    torch.testing.assert_close(y.flatten(), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(z.flatten(), 10 * wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 2])
def test_gradients(ops, device, batch):
    q, k, angles = setting((3, 2, 2, 1, 6), torch.float64, device, batch)
    q.requires_grad_(), k.requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k: ops.rotary(q, k, angles), (q, k))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_of_one_product(ops, device, dtype):
    """Queries and keys as Megatron-Core has them: columns of the output of one linear layer."""
    qkv = random_tensor(6, 2, 3, 3 * 16, dtype=dtype, device=device, seed=3)
    q, k, _ = qkv.split(16, dim=-1)
    assert not q.is_contiguous()
    angles = angles_of(6, 1, 16, device)
    for x, y in zip((q, k), ops.rotary(q, k, angles), strict=True):
        assert torch.equal(y, ops.rotary(x.contiguous(), x.contiguous(), angles)[0])
        assert_close(y, turned(float64(x), float64(angles)), dtype)


def mixed(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, batch: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of a layer for queries, keys and values, with several queries to a key."""
    length, sequences, heads, groups, width = shape
    columns = (heads // groups + 2) * width
    qkv = random_tensor(length, sequences, groups, columns, dtype=dtype, device=device, seed=4)
    return qkv, angles_of(length, batch or 1, width, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_queries_keys_and_values_of_one_product(ops, device, shape, dtype):
    """Entry by entry: head h of the queries is number h % r of group h / r."""
    qkv, angles = mixed(shape, dtype, device)
    q, k, v = ops.split_and_rotate(qkv, angles)
    _, _, heads, groups, width = shape
    per_group = heads // groups
    by_head = float64(qkv).reshape(*qkv.shape[:3], per_group + 2, width)
    for head in range(heads):
        of_head = by_head[:, :, head // per_group, head % per_group]
        assert_close(q[:, :, head], turned(of_head, float64(angles)[:, :, 0]), dtype)
    assert_close(k, turned(by_head[:, :, :, per_group], float64(angles)), dtype)
    assert np.array_equal(float64(v), by_head[:, :, :, per_group + 1])
    assert all(x.dtype == dtype and x.is_contiguous() for x in (q, k, v))
    assert q.shape[2] == heads


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_split_and_rotated_are_the_bits_of_rotary(ops, device, dtype, batch):
    qkv, angles = mixed((5, 3, 6, 2, 16), dtype, device, batch)
    q, k, v = qkv.split([48, 16, 16], dim=-1)
    rotated = ops.rotary(q.reshape(5, 3, 6, 16), k, angles)
    for one, other in zip(ops.split_and_rotate(qkv, angles), (*rotated, v), strict=True):
        assert torch.equal(one, other)


def test_nothing_keeps_the_product(ops, device):
    """Values that were a view would keep the memory of all columns for the backward pass."""
    qkv, angles = mixed((4, 2, 4, 2, 8), torch.float32, device)
    addresses = {x.untyped_storage().data_ptr() for x in ops.split_and_rotate(qkv, angles)}
    assert len(addresses) == 3 and qkv.untyped_storage().data_ptr() not in addresses


@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_of_the_product(ops, device, batch):
    qkv, angles = mixed((3, 2, 4, 2, 6), torch.float64, device, batch)
    qkv.requires_grad_()
    assert torch.autograd.gradcheck(lambda qkv: ops.split_and_rotate(qkv, angles), (qkv,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_of_the_product_and_of_gradients(ops, device, dtype):
    """A slice of a wider product, as tensor parallelism takes it, and gradients in attention's
    order."""
    qkv, angles = mixed((5, 2, 4, 2, 8), dtype, device)
    wide = torch.cat([qkv, qkv], dim=-1)[..., : qkv.shape[-1]]
    given = [wide.requires_grad_(), qkv.clone().requires_grad_()]
    found = []
    for mine in given:
        outputs = ops.split_and_rotate(mine, angles)
        upstream = [
            random_tensor(*x.shape, dtype=dtype, device=device, seed=seed)
            for seed, x in enumerate(outputs)
        ]
        if mine is wide:
            upstream = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in upstream]
        found.append((*outputs, *torch.autograd.grad(outputs, mine, upstream)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_columns_that_are_apart(ops, device):
    q, k, angles = setting((4, 2, 2, 2, 8), torch.float32, device)
    apart = q.transpose(2, 3).contiguous().transpose(2, 3)
    assert apart.stride(3) != 1
    for y, z in zip(ops.rotary(apart, k, angles), ops.rotary(q, k, angles), strict=True):
        assert torch.equal(y, z)


def test_is_what_megatron_core_computes(ops, device):
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    q, k, angles = setting((9, 2, 3, 1, 32), torch.float32, device)
    for x, y in zip((q, k), ops.rotary(q, k, angles), strict=True):
        torch.testing.assert_close(y, _apply_rotary_pos_emb_bshd(x, angles), rtol=1e-5, atol=1e-6)


def test_in_bf16_the_result_is_rounded_once(native):
    q, k, angles = setting((20, 2, 2, 2, 64), torch.bfloat16, "cpu")
    for x, y in zip((q, k), native.rotary(q, k, angles), strict=True):
        wanted = turned(float64(x), float64(angles))
        assert (np.abs(float64(y) - wanted) <= np.abs(wanted) * 2.0**-8 + 1e-6).all()


def test_threads_do_not_change_a_bit(native, two_threads):
    results = []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        results.append(native.rotary(*setting((300, 2, 4, 2, 64), torch.float32, "cpu")))
        results[-1] += native.split_and_rotate(*mixed((300, 2, 4, 2, 64), torch.float32, "cpu"))
    for two, one in zip(*results, strict=True):
        assert torch.equal(two, one)


def test_other_shapes_are_refused(native):
    q, k, angles = setting((5, 2, 4, 2, 6), torch.float32, "cpu")
    with pytest.raises(ValueError, match="q must have 4 dimensions"):
        native.rotary(q[0], k, angles)
    with pytest.raises(ValueError, match="k must have shape"):
        native.rotary(q, k[:, :1], angles)
    with pytest.raises(ValueError, match="angles must have shape"):
        native.rotary(q, k, angles[:4])
    with pytest.raises(ValueError, match="angles must have shape"):
        native.rotary(q, k, angles[..., :4])
    with pytest.raises(ValueError, match="heads must have an even width, not 5"):
        native.rotary(q[..., :5], k[..., :5], angles[..., :5])
    with pytest.raises(TypeError, match="k is Double, q is Float"):
        native.rotary(q, k.double(), angles)
    mixed_heads, angles = mixed((5, 2, 4, 2, 6), torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"must be r \+ 2 heads of 6, not 12"):
        native.split_and_rotate(mixed_heads[..., :12], angles)
    with pytest.raises(ValueError, match=r"must be r \+ 2 heads of 6, not 23"):
        native.split_and_rotate(mixed_heads[..., :23], angles)
    with pytest.raises(ValueError, match="angles must have shape"):
        native.split_and_rotate(mixed_heads, angles[:4])
