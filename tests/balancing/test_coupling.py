"""The coupling loss on numbers by hand, at the start of a model, and on several ranks."""

from dataclasses import replace

import numpy
import pytest
import torch
from torch import distributed as dist

from moe_parallel.balancing.losses import (
    Coupling,
    coupling_loss,
    measured_coupling,
    noise_bound,
    with_noise,
)
from moe_parallel.config import make_config
from moe_parallel.parallel import destroy_groups, groups_of_one, initialize_groups
from moe_parallel.telemetry.statistics import RoutingStatistics
from tests.distributed import run_distributed
from tests.layers.cases import CASES
from tests.layers.single import build, values
from tests.oracles import losses as oracle

ALONE = groups_of_one()
EYE = torch.eye(2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loss_of(norms, alpha):
    m = torch.tensor(norms)
    return float(coupling_loss(Coupling(m.T, m.diagonal(), 0), alpha, ALONE))


def test_by_hand():
    w_g = EYE.unsqueeze(2)  # W_g^1 = e_1, W_g^2 = e_2
    for experts, wanted in ((w_g, 0.0), (w_g.flip(0), 1.0)):
        m = measured_coupling(EYE, experts, ALONE)
        assert float(coupling_loss(m, 1.0, ALONE)) == wanted
    assert loss_of([[1.0, 0.8], [0.8, 1.0]], 1.0) == 0
    assert loss_of([[1.0, 0.8], [0.8, 1.0]], 0.5) == pytest.approx(0.3)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_equals_the_papers_sum(alpha):
    rng = numpy.random.default_rng(0)
    rows, w_g = rng.normal(size=(5, 4)), rng.normal(size=(5, 4, 3))
    m = measured_coupling(torch.from_numpy(rows), torch.from_numpy(w_g), ALONE)
    norms = oracle.coupling_norms(rows, w_g)
    numpy.testing.assert_allclose(m.norms_LE.T, norms, rtol=1e-12)
    numpy.testing.assert_allclose(m.own_E, norms.diagonal(), rtol=1e-12)
    wanted = oracle.coupling(norms, alpha)
    assert float(coupling_loss(m, alpha, ALONE)) == pytest.approx(wanted, rel=1e-12)


def test_a_row_with_noise_stays_nearest_to_itself():
    router = torch.randn(6, 8, generator=generator(), dtype=torch.float64)
    bounds = noise_bound(router)
    numpy.testing.assert_allclose(bounds, oracle.noise_bound(router.numpy()), rtol=1e-12)
    nearest = torch.cdist(router, router).fill_diagonal_(torch.inf).amin(dim=1)
    for seed in range(50):
        moved = torch.linalg.vector_norm(with_noise(router, generator(seed)) - router, dim=1)
        assert (moved <= nearest / 2).all() and (moved > 0).all()


def test_equal_rows_and_rows_of_zeros_have_no_noise_and_finite_gradients():
    router = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]], requires_grad=True)
    assert noise_bound(router.detach()).tolist() == [0, 0, 0]
    w_g = torch.zeros(3, 2, 2, requires_grad=True)
    coupling_loss(
        measured_coupling(with_noise(router, generator()), w_g, ALONE), 1.0, ALONE
    ).backward()
    assert torch.isfinite(router.grad).all() and torch.isfinite(w_g.grad).all()


def test_the_noise_is_that_of_the_step_and_the_layer():
    case, steps = CASES["topk, coupling"], iter([0, 0, 1, 0])
    given = values(case)
    layer = build(case, given, torch.float64, "reference")
    statistics = RoutingStatistics(2, len(given["w_router_ED"]), torch.device("cpu"))
    layer.context = replace(layer.context, statistics=statistics, iteration=lambda: next(steps))
    found = []
    for number in (1, 1, 1, 2):
        layer.set_layer_number(number)
        found.append(float(layer.coupling_loss(None, None).detach()))
    first, again, later, in_the_second_layer = found
    assert first == again and len({first, later, in_the_second_layer}) == 3


E, D, F = 4, 6, 8


def _parts(ep: int, etp: int):
    """The loss, and the gradients of this rank's part of it: of R and of its part of W_g."""
    sizes = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    groups = initialize_groups(make_config(sizes).parallel)
    router = torch.randn(E, D, generator=generator(), dtype=torch.float64, requires_grad=True)
    whole = torch.randn(E, D, F, generator=generator(1), dtype=torch.float64)
    here = whole.chunk(ep)[groups.ep.rank()].chunk(etp, dim=2)[groups.etp.rank()]
    w_g = here.clone().requires_grad_()
    loss = coupling_loss(measured_coupling(router, w_g, groups), 0.5, groups)
    loss.backward()
    found = float(loss), router.grad.numpy(), w_g.grad.numpy(), groups.ep.rank(), groups.etp.rank()
    dist.barrier()
    destroy_groups()
    return found


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (4, 1), (2, 2)])
def test_ranks_divide_it(ep, etp):
    """Each has the value; the gradients of R are parts of a sum, those of W_g are whole."""
    ((value, of_router, of_gates, *_),) = run_distributed(1, _parts, 1, 1)
    ranks = run_distributed(ep * etp, _parts, ep, etp)
    assert [loss for loss, *_ in ranks] == pytest.approx([value] * ep * etp, rel=1e-12)
    numpy.testing.assert_allclose(sum(rank[1] for rank in ranks), of_router, rtol=1e-10)
    for _, _, part, e, t in ranks:
        wanted = numpy.split(numpy.split(of_gates, ep)[e], etp, axis=2)[t]
        numpy.testing.assert_allclose(part, wanted, rtol=1e-10)
