"""Auxiliary losses: closed forms, the per-token transcription, gradients, sums over ranks."""

import math

import numpy
import pytest
import torch
from torch import distributed as dist

from moe_parallel.balancing import load_balancing_loss, z_loss
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.topk import topk_of_logits
from tests.distributed import run_distributed
from tests.layers.single import SingleRank
from tests.oracles import layers as oracle

ALONE = SingleRank()


def _logits(tokens=12, experts=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tokens, experts, generator=generator, dtype=dtype)


@pytest.mark.parametrize("experts", [2, 8])
@pytest.mark.parametrize("k", [1, 2])
def test_uniform_routing_gives_k(experts, k):
    # Token t chooses experts t, t + 1, ...: loads are equal, and so are all probabilities.
    experts_TK = (torch.arange(experts)[:, None] + torch.arange(k)) % experts
    choices = Choices(experts_TK, torch.ones(experts, k), torch.zeros(experts, experts))
    assert load_balancing_loss(choices, ALONE).item() == pytest.approx(k)


def test_uniform_probabilities_give_k_whatever_the_load():
    choices = Choices(torch.tensor([[0, 1]] * 6), torch.ones(6, 2), torch.zeros(6, 4))
    assert load_balancing_loss(choices, ALONE).item() == pytest.approx(2)


def test_all_tokens_to_one_expert_give_n():
    scores = torch.full((6, 4), -50.0)
    scores[:, 3] = 50.0
    choices = Choices(torch.full((6, 1), 3), torch.ones(6, 1), scores)
    assert load_balancing_loss(choices, ALONE).item() == pytest.approx(4)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_load_balancing_equals_the_transcription(k):
    logits = _logits()
    wanted = oracle.load_balancing_loss(oracle.route(logits.numpy(), k))
    loss = load_balancing_loss(topk_of_logits(logits, k), ALONE)
    assert loss.shape == () and loss.item() == pytest.approx(wanted, rel=1e-12)


def test_load_balancing_is_fp32_for_fp32_scores():
    loss = load_balancing_loss(topk_of_logits(_logits(dtype=torch.float32), 2), ALONE)
    assert loss.dtype == torch.float32


def test_gradient_does_not_pass_through_the_load():
    logits = _logits().requires_grad_()
    load_balancing_loss(topk_of_logits(logits, 2), ALONE).backward()
    routing = oracle.route(logits.detach().numpy(), 2)

    def with_fixed_loads(values):
        return oracle.load_balancing_loss(oracle.Routing(values["s"], routing.experts, []))

    wanted = oracle.numeric_gradient(with_fixed_loads, {"s": logits.detach().numpy()})["s"]
    numpy.testing.assert_allclose(logits.grad.numpy(), wanted, atol=1e-9)
    assert abs(wanted).max() > 1e-3


def test_empty_slots_are_no_load():
    logits = _logits()
    none = Choices(torch.full((12, 2), -1), torch.ones(12, 2), logits)
    assert load_balancing_loss(none, ALONE) == 0


def test_zero_logits_give_the_square_of_ln_n():
    assert z_loss(torch.zeros(3, 8), ALONE).item() == pytest.approx(4.324, abs=5e-4)
    assert z_loss(torch.zeros(3, 8), ALONE).item() == pytest.approx(math.log(8) ** 2)


def test_one_hot_logits():
    logits = torch.zeros(5, 3)
    logits[:, 1] = 4.0
    wanted = math.log(math.exp(4.0) + 2) ** 2
    assert z_loss(logits, ALONE).item() == pytest.approx(wanted)


def test_z_loss_equals_the_transcription_with_its_gradient():
    logits = _logits().requires_grad_()
    loss = z_loss(logits, ALONE)
    loss.backward()
    values = logits.detach().numpy()
    assert loss.item() == pytest.approx(oracle.z_loss(values), rel=1e-12)
    wanted = oracle.numeric_gradient(lambda given: oracle.z_loss(given["l"]), {"l": values})["l"]
    numpy.testing.assert_allclose(logits.grad.numpy(), wanted, atol=1e-8)


def _losses_of_a_part():
    part = _logits().chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    choices = topk_of_logits(part, 2)
    balance, size = load_balancing_loss(choices, dist.group.WORLD), z_loss(part, dist.group.WORLD)
    (3 * balance + size).backward()
    return balance.item(), size.item(), part.grad.numpy()


def test_tensor_parallel_ranks_share_the_losses_of_the_whole_micro_batch():
    logits = _logits().requires_grad_()
    balance, size = load_balancing_loss(topk_of_logits(logits, 2), ALONE), z_loss(logits, ALONE)
    (3 * balance + size).backward()
    ranks = run_distributed(2, _losses_of_a_part)
    for found_balance, found_size, _ in ranks:
        assert found_balance == pytest.approx(balance.item(), rel=1e-12)
        assert found_size == pytest.approx(size.item(), rel=1e-12)
    gradients = numpy.concatenate([gradient for _, _, gradient in ranks])
    numpy.testing.assert_allclose(gradients, logits.grad.numpy(), rtol=1e-12, atol=1e-15)
