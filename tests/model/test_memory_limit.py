"""The operating system limits the memory of ranks: the worst case needs the activation budget."""

import resource
from pathlib import Path

import pytest
import torch

from moe_parallel.config import make_config
from moe_parallel.layers import DispatchedLayer
from tests.distributed import RankError, run_distributed
from tests.model.small_gpt import SIZES, Options, build
from tests.model.test_layouts import layout

MIB = 2**20
#: All tokens of two ranks go to the first expert: 4,096 rows, whose activations are 384 MiB. The
#: rows, their gradients, and those of the weights of two experts need less than 32 MiB.
D, WIDTH, TOKENS = 64, 4096, 2048
WORST: Options = {
    "moe_router_topk": 1,
    "moe_router_force_routing": "hot:1",
    "moe_layer_freq": "4",
    "hidden_size": D,
    "ffn_hidden_size": WIDTH,
    "moe_aux_loss_coeff": 0.0,
}
#: Besides what a rank has before. Measured: with the budget 48 MiB are enough, without it 256 are
#: too few.
LIMIT = 160 * MIB
BUDGET = {"moe_activation_budget": 16.0}
SYSTEMS: dict[str, Options] = {
    "topk": {},
    "aoe": {"expert_selection": "aoe", "aoe_low_rank_size": 8, "aoe_wide_size": WIDTH},
}


def _data_bytes() -> int:
    """What the limit counts: the writable memory of this process alone."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no VmData")


def _pass_of(layer: DispatchedLayer, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    x = torch.randn(tokens, 1, D, generator=generator).requires_grad_()
    layer(x)[0].square().sum().backward()
    assert x.grad is not None
    return x.grad


def _pass_within_limit(options: Options) -> bool:
    engine = build(make_config(SIZES | layout(ep=2) | WORST | options))
    (layer,) = (each for each in engine.chunks[0].modules() if isinstance(each, DispatchedLayer))
    layer.train()
    _pass_of(layer, 8)  # starts threads and allocates gradients of weights
    limit = _data_bytes() + LIMIT
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return bool(_pass_of(layer, TOKENS).isfinite().all())


@pytest.mark.full
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_worst_case_fits_with_a_budget_only(system: str) -> None:
    options = SYSTEMS[system]
    assert run_distributed(2, _pass_within_limit, options | BUDGET) == [True, True]
    with pytest.raises(RankError, match=r"(?s)rank 0 failed.*(can't allocate memory|bad_alloc)"):
        run_distributed(2, _pass_within_limit, options)
