"""Auxiliary losses: closed forms, per-token oracles, gradients, and sums over ranks."""

import math
from functools import partial

import numpy
import pytest
import torch
from torch import distributed as dist

from moe_parallel.balancing.losses import (
    global_load_balancing_loss,
    importance_loss,
    load_balancing_loss,
    sequence_load_balancing_loss,
    z_loss,
)
from moe_parallel.layers.dispatched import SplitTokens
from moe_parallel.selection import rules
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens
from moe_parallel.selection.topk import TopK
from moe_parallel.systems.relu.rule import ReLU, l1_loss
from moe_parallel.systems.top_p.rule import TopP, entropy_loss
from tests.distributed import run_distributed
from tests.oracles import losses as oracle
from tests.oracles import routing
from tests.oracles.layers import numeric_slopes, slopes

SEQUENCES = 3
ALONE = Tokens(SEQUENCES)
SHARE = [0.7, 0.1, 0.5, 0.3, 0.4]
LOSSES = {
    "load balancing": load_balancing_loss,
    "of sequences": sequence_load_balancing_loss,
    "of a step": partial(global_load_balancing_loss, share_E=torch.tensor(SHARE)),
    "importance": importance_loss,
    "z": z_loss,
    "entropy": entropy_loss,
    "l1": partial(l1_loss, target=1.5),
}
ORACLES = {
    "load balancing": oracle.load_balancing,
    "of sequences": partial(oracle.sequence_load_balancing, sequences=SEQUENCES),
    "of a step": partial(oracle.load_balancing, load_elsewhere=SHARE),
    "importance": oracle.importance,
    "z": lambda routing: oracle.z(routing.scores),
    "entropy": oracle.entropy,
    "l1": partial(oracle.l1, target=1.5),
}
RULES = {
    "top-1": (TopK(1, rules.raw_probability), partial(routing.top_k, k=1, gate="all")),
    "top-2": (TopK(2), partial(routing.top_k, k=2)),
    "all": (TopK(5), partial(routing.top_k, k=5)),
    "sigmoid": (
        TopK(2, rules.sigmoid_share_of_selected, rules.sigmoid_shares, torch.sigmoid),
        partial(routing.top_k, k=2, score_function="sigmoid", rank_by="probabilities"),
    ),
    "top-p": (TopP(0.5), partial(routing.top_p, p=0.5)),
    "relu": (ReLU(), routing.relu),
}


def _logits(tokens=12, experts=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tokens, experts, generator=generator, dtype=dtype)


def uniform(experts_TK: torch.Tensor, num_experts: int) -> Choices:
    """Choices with equal probabilities and probs."""
    scores_TE = torch.zeros(len(experts_TK), num_experts)
    probs_TK = torch.full(experts_TK.shape, 0.5)
    return Choices(experts_TK, probs_TK, scores_TE, torch.softmax(scores_TE, dim=1))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_the_transcription_with_its_gradient(loss, rule):
    choose, transcribed = RULES[rule]
    logits = _logits().requires_grad_()
    found = LOSSES[loss](choose(logits, ALONE), ALONE)
    found.backward()
    values = logits.detach().numpy()

    def of(scores):
        return ORACLES[loss](transcribed(scores))

    assert found.shape == ()
    assert found.item() == pytest.approx(of(values), rel=1e-6)  # the load of a step is fp32
    wanted = numeric_slopes(lambda given: of(given["s"]), {"s": values})["s"]
    numpy.testing.assert_allclose(slopes(logits.grad.numpy()), wanted, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_fp32_for_fp32_scores(loss):
    logits = _logits(dtype=torch.float32).requires_grad_()
    found = LOSSES[loss](TopK(2)(logits, ALONE), ALONE)
    found.backward()
    assert found.dtype == logits.grad.dtype == torch.float32
    exact = LOSSES[loss](TopK(2)(_logits(dtype=torch.float32).double(), ALONE), ALONE)
    assert found.item() == pytest.approx(exact.item(), rel=1e-5)


def test_the_l1_loss_by_hand():
    # 4 tokens have both of 2 experts with prob 1, at K = 1: f = 2, and the loss is n^2 / K.
    ones = ReLU()(torch.ones(4, 2), Tokens(1))
    assert l1_loss(ones, Tokens(1), 1).item() == 4
    # Each of 2 experts has half of 4 tokens, one each: f = 1, and the loss is the mean prob.
    scores_TE = torch.tensor([[1.0, -1], [2, -1], [-1, 3], [0, 4]], requires_grad=True)
    even = l1_loss(ReLU()(scores_TE, Tokens(1)), Tokens(1), 1)
    assert even.item() == 2.5
    even.backward()
    assert scores_TE.grad.tolist() == [[0.25, 0], [0.25, 0], [0, 0.25], [0, 0.25]]  # f / T


def test_before_the_first_step_no_load_is_known():
    logits = _logits().requires_grad_()
    loss = global_load_balancing_loss(TopK(2)(logits, ALONE), ALONE, torch.zeros(5))
    loss.backward()
    assert loss == 0 and (logits.grad == 0).all()


@pytest.mark.parametrize(
    "loss", [load_balancing_loss, sequence_load_balancing_loss, importance_loss]
)
def test_empty_slots_are_no_load(loss):
    assert loss(uniform(torch.full((12, 2), -1), 5), ALONE) == 0
    some, more = torch.tensor([[0, -1, -1]] * 6), torch.tensor([[-1, 0, -1]] * 6)
    assert loss(uniform(some, 4), ALONE) == loss(uniform(more, 4), ALONE) > 0


def test_the_entropy_of_equal_and_of_certain_probabilities():
    assert entropy_loss(uniform(torch.zeros(3, 1).long(), 8), ALONE).item() == pytest.approx(
        math.log(8)
    )
    logits = torch.zeros(5, 3)
    logits[:, 1] = 200.0  # the other probabilities underflow to 0, for which ln is undefined
    logits.requires_grad_()
    loss = entropy_loss(TopP(0.5)(logits, ALONE), ALONE)
    loss.backward()
    assert loss == 0 and torch.isfinite(logits.grad).all()


def _losses_of_a_part():
    """Every loss of this rank's part of each sequence, and the gradient of its scores."""
    tokens = SplitTokens(SEQUENCES, dist.group.WORLD)
    found = {}
    for rule, (choose, _) in RULES.items():
        for name, loss in LOSSES.items():
            part = tokens.of_this_rank(_logits()).clone().requires_grad_()
            value = loss(choose(part, tokens), tokens)
            value.backward()
            found[rule, name] = (value.item(), part.grad.numpy())
    return found


def test_tensor_parallel_ranks_share_the_losses_of_the_whole_micro_batch():
    ranks = run_distributed(2, _losses_of_a_part)
    for (rule, name), (value, _) in ranks[0].items():
        logits = _logits().requires_grad_()
        whole = LOSSES[name](RULES[rule][0](logits, ALONE), ALONE)
        whole.backward()
        assert value == pytest.approx(whole.item(), rel=1e-12), (rule, name)
        assert ranks[1][rule, name][0] == value, (rule, name)
        gradient = numpy.concatenate([rank[rule, name][1] for rank in ranks])
        numpy.testing.assert_allclose(
            gradient, logits.grad.numpy(), rtol=1e-10, atol=1e-15, err_msg=f"{rule}, {name}"
        )
