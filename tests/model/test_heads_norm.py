"""The norm over all heads: against the oracle, on one rank and with heads divided over two."""

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from moe_parallel.model.heads_norm import over
from tests.distributed import run_distributed
from tests.ops.cases import assert_close, float64, random_tensor
from tests.oracles import ops as oracle

S, B, H, C = 5, 2, 4, 6
EPS = 1e-3


def _values(dtype):
    x, dy = (random_tensor(S, B, H, C, dtype=dtype, device="cpu", seed=seed) for seed in (0, 1))
    return x, random_tensor(H * C, dtype=dtype, device="cpu", seed=2), dy


def _of_rank(dtype):
    """y, dx and dweight of this rank's heads, and what the forward pass keeps of each dtype."""
    x, weight, dy = _values(dtype)
    tp = dist.group.WORLD
    norm = over(H, tp)(hidden_size=C, eps=EPS).to(dtype)
    heads = slice(tp.rank() * H // tp.size(), (tp.rank() + 1) * H // tp.size())
    norm.weight.data.copy_(weight.view(H, C)[heads].flatten())
    # As in attention, where the heads of the queries are a part of a wider tensor.
    x = x[:, :, heads].requires_grad_()
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = norm(x)
    dx, dweight = torch.autograd.grad(y, (x, norm.weight), dy[:, :, heads])
    wide = sum(t.numel() for t in kept if t.dtype == torch.float32)
    return y.detach(), dx, dweight, wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_equals_the_oracle_and_keeps_a_number_per_token_in_fp32(ranks, dtype):
    of_ranks = run_distributed(ranks, _of_rank, dtype)
    x, weight, dy = (float64(each) for each in _values(dtype))
    rows, upstream = x.reshape(-1, H * C), dy.reshape(-1, H * C)
    wanted = oracle.rms_norm(rows, weight, EPS)
    dx, dweight = oracle.rms_norm_gradient(upstream, rows, weight, EPS)
    for place, of_whole in enumerate((wanted, dx)):
        found = torch.cat([each[place] for each in of_ranks], dim=2)
        assert found.dtype == dtype
        assert_close(found.reshape(-1, H * C), of_whole, dtype)
    assert_close(torch.cat([each[2] for each in of_ranks]), dweight, dtype)
    if dtype == torch.bfloat16:
        assert {each[3] for each in of_ranks} == {S * B}
