"""W_down gathered for each use: which parts are stored, recomputed, sent and summed over ranks."""

import time
from typing import Any

import numpy
import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from moe_parallel.config import make_config
from moe_parallel.layers import AutonomousLayer, LayerContext
from moe_parallel.layers.system import system_of
from moe_parallel.ops import extension, select_backend
from moe_parallel.parallel import Groups, destroy_groups, initialize_groups
from moe_parallel.systems import AoESelection
from moe_parallel.telemetry.statistics import RoutingStatistics
from tests.distributed import run_distributed

E, D, R, W, TOKENS, CHOICES = 4, 6, 3, 4, 5, 2
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
BACKENDS = ["reference"] + ["native"] * extension.is_built()

#: ep, etp and the size of the world. With ep 2 and etp 2, rank 2 e + t has part t of experts
#: 2 e and 2 e + 1.
SPREADS = {"ep2": (2, 1, 2), "ep4": (4, 1, 4), "etp2": (1, 2, 2), "ep2 x etp2": (2, 2, 4)}


def w_down() -> numpy.ndarray:
    return numpy.random.default_rng(0).normal(size=(E, D, R))


def tokens(rank: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """A rank's tokens [T, D], and the weights of their norms [T, E] in a scalar."""
    rng = numpy.random.default_rng(1 + rank)
    return rng.normal(size=(TOKENS, D)), rng.normal(size=(TOKENS, E))


def groups_of(ep: int, etp: int) -> Groups:
    sizes = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    return initialize_groups(make_config(sizes).parallel)


def build(groups: Groups, backend: str, gathers: bool = True, **options: Any) -> AutonomousLayer:
    selection = AoESelection(
        aoe_low_rank_size=R, aoe_wide_size=W, moe_router_topk=CHOICES, aoe_gather_w_down=gathers
    )
    config = TransformerConfig(
        num_layers=1,
        hidden_size=D,
        num_attention_heads=2,
        num_moe_experts=E,
        params_dtype=torch.float64,
        **options,
    )
    statistics = RoutingStatistics(1, E, torch.device("cpu"))
    context = LayerContext(groups, select_backend(backend), statistics, None, 1)
    layer = system_of(selection).build(config, selection, W, context)
    assert isinstance(layer, AutonomousLayer)
    layer.set_layer_number(1)
    with torch.no_grad():
        for weight in layer.experts.parameters():
            weight.fill_(0.1)
        whole = torch.from_numpy(w_down())
        layer.w_down_EDR.copy_(part(whole, groups) if gathers else whole)
    return layer


def part(whole_EDR: torch.Tensor, groups: Groups) -> torch.Tensor:
    here_LDR = whole_EDR.chunk(groups.ep.size())[groups.ep.rank()]
    return here_LDR.chunk(groups.etp.size(), dim=1)[groups.etp.rank()]


def _use_both(ep: int, etp: int, backend: str, is_recomputed: bool) -> Any:
    """The weight's part and gradient here, the tensor at each use, and whether it was kept."""
    groups = groups_of(ep, etp)
    layer = build(groups, backend, **(RECOMPUTED if is_recomputed else {}))
    x, weights = (torch.from_numpy(each) for each in tokens(dist.get_rank()))
    with layer.w_down.whole() as whole:
        seen, storage = whole.detach().numpy().copy(), StorageWeakRef(whole.untyped_storage())
        norms_TE = layer.context.ops.norm_topk(x.requires_grad_(), whole, CHOICES).norms_TE
    del whole
    is_kept = not _is_freed(storage)
    with layer.w_down.local() as local:
        here = local.detach().numpy().copy()
        used_twice = (norms_TE * weights).sum() + (1.0 + dist.get_rank()) * local.square().sum()
    del local
    used_twice.backward()
    found = layer.w_down_EDR.detach().numpy(), layer.w_down_EDR.grad.numpy(), seen, here, is_kept
    dist.barrier()
    destroy_groups()
    return found


def _is_freed(storage: StorageWeakRef) -> bool:
    """Whether it is freed soon: a thread of gloo may still hold a sent tensor."""
    for _ in range(50):
        if storage.expired():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.covering
@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spread", SPREADS)
def test_what_ranks_hold_and_learn(spread: str, backend: str, is_recomputed: bool) -> None:
    """The gradient of the norms is a sum over all tokens, that of the experts over their shards."""
    ep, etp, world = SPREADS[spread]
    whole = w_down()
    wanted = numpy.zeros_like(whole)
    for rank in range(world):
        x_TD, weights_TE = tokens(rank)
        c_TER = numpy.einsum("td,edr->ter", x_TD, whole)
        a_TE = weights_TE / numpy.sqrt((c_TER**2).sum(2))
        wanted += numpy.einsum("td,te,ter->edr", x_TD, a_TE, c_TER)
        first = rank // etp * (E // ep)
        wanted[first : first + E // ep] += (1 + rank) * 2 * whole[first : first + E // ep]

    ranks = run_distributed(world, _use_both, ep, etp, backend, is_recomputed)
    for rank, (held, gradient, seen, here, is_kept) in enumerate(ranks):
        experts = slice(rank // etp * (E // ep), (rank // etp + 1) * (E // ep))
        rows = slice(rank % etp * (D // etp), (rank % etp + 1) * (D // etp))
        numpy.testing.assert_array_equal(held, whole[experts, rows])
        numpy.testing.assert_array_equal(seen, whole)
        numpy.testing.assert_array_equal(here, whole[experts])
        numpy.testing.assert_allclose(gradient, wanted[experts, rows], rtol=1e-12, atol=1e-12)
        if backend == "native":  # the reference's product keeps its own copy
            assert is_kept == is_recomputed


def _bytes_sent(ep: int, etp: int, gathers: bool) -> float:
    """The bytes that this rank sends in one forward pass of a layer."""
    groups = groups_of(ep, etp)
    layer = build(groups, "reference", gathers)
    x, _ = tokens(dist.get_rank())
    layer(torch.from_numpy(x)[:, None])
    (summary,) = layer.context.statistics.training.reduced([]).summaries()
    dist.barrier()
    destroy_groups()
    return summary["wire_bytes_per_token"] * TOKENS


@pytest.mark.parametrize(
    "spread, sent",
    [
        ("ep2", 2 * D * R),  # two experts, to one other rank
        ("ep4", 1 * D * R * 3),
        ("etp2", 2 * (4 * D // 2 * R)),  # half of four experts, for the scores and for the output
        ("ep2 x etp2", 2 * (2 * D // 2 * R) + 2 * D * R),
    ],
)
def test_bytes_on_the_wire(spread: str, sent: int) -> None:
    ep, etp, world = SPREADS[spread]
    gathered = run_distributed(world, _bytes_sent, ep, etp, True)
    replicated = run_distributed(world, _bytes_sent, ep, etp, False)
    for more, less in zip(gathered, replicated, strict=True):
        assert round(more - less) == 8 * sent
