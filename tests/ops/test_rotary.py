"""Rotation of queries and keys beside its oracle (test_operators.py): by hand, and memory."""

import math

import pytest
import torch

from tests.ops.cases import DTYPES, random_tensor
from tests.ops.test_operators import angles_of

pytestmark = pytest.mark.covering


def test_a_quarter_turn_by_hand(ops, device):
    q = torch.tensor([1.0, 2, 3, 4], device=device).view(1, 1, 1, 4)
    angles = torch.tensor([math.pi / 2, 0] * 2, device=device).view(1, 1, 1, 4)
    y, z = ops.rotary(q, 10 * q, angles)
    wanted = torch.tensor([-3.0, 2, 1, 4], device=device)
    torch.testing.assert_close(y.flatten(), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(z.flatten(), 10 * wanted, rtol=0, atol=1e-5)


def mixed(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, batch: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of a layer for queries, keys and values, with several queries to a key."""
    length, sequences, heads, groups, width = shape
    columns = (heads // groups + 2) * width
    qkv = random_tensor(length, sequences, groups, columns, dtype=dtype, device=device, seed=4)
    return qkv, angles_of(length, batch or 1, width, device)


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
