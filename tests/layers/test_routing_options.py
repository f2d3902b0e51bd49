"""Effects besides the output: jitter, forced balance, bias and load of a step, records."""

import functools
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import distributed as dist

from moe_parallel.config import make_config
from moe_parallel.parallel import destroy_groups, initialize_groups, seed_ranks, uniform_like
from moe_parallel.selection.tokens import Tokens
from moe_parallel.systems.expert_choice import ExpertsChoose
from tests.distributed import run_distributed
from tests.layers.cases import (
    BIASED,
    CASES,
    GLOBAL,
    aoe,
    aoe_expert_choice,
    close,
    direction,
    expert_choice,
    topk,
    uoe,
)
from tests.layers.expected import expected_routing
from tests.layers.single import EXPERTS, WIDTH, Case, build, run, values
from tests.oracles import losses
from tests.oracles.layers import softmax, swiglu_expert

EPS = 0.25
JITTER = Case(topk(k=EXPERTS, aux=0.0, z=0.0, moe_input_jitter_eps=EPS), tokens=64)


def counted(layer: Any) -> dict[str, Any]:
    (summary,) = layer.context.statistics.training.summaries()
    return summary


def _jittered(size: str) -> dict[str, Any]:
    """The logits of a router of unit vectors: the first inputs, times the noise."""
    groups = initialize_groups(make_config({size: 2}).parallel)
    seed_ranks(7, groups)
    given = values(JITTER)
    given["w_router_ED"] = numpy.eye(EXPERTS, WIDTH)
    layer = build(JITTER, given, torch.float64, "reference")
    seen = []
    choose = layer.choose
    layer.choose = lambda *args: seen.append(choose(*args)) or seen[-1]
    outputs = [run(layer, given, direction(JITTER))[0] for _ in range(2)]
    layer.eval()
    outputs.append(run(layer, given, direction(JITTER))[0])
    of_sequences = uniform_like(torch.empty(9), groups, shared=True).numpy()
    dist.barrier()
    destroy_groups()
    scores = [choices.scores_TE.detach().numpy() for choices in seen]
    return {"scores": scores, "outputs": outputs, "of_sequences": of_sequences}


@pytest.mark.parametrize(
    ("size", "same_sequences"),
    [
        ("tensor_model_parallel_size", True),
        ("context_parallel_size", True),
        ("expert_model_parallel_size", False),
        ("pipeline_model_parallel_size", False),
    ],
)
def test_jitter_is_for_the_router_and_for_training(size, same_sequences):
    ranks = run_distributed(2, _jittered, size)
    first, second = (rank["of_sequences"] for rank in ranks)
    assert (first == second).all() == same_sequences
    given = values(JITTER)
    x_TD = given["x"].reshape(-1, WIDTH)
    noises = []
    for rank in ranks:
        *training, evaluation = rank["scores"]
        numpy.testing.assert_array_equal(evaluation, x_TD[:, :EXPERTS].astype("float32"))
        for scores in training:
            noise = scores / x_TD[:, :EXPERTS]
            assert 1 - EPS - 1e-6 <= noise.min() < 1 - 0.8 * EPS
            assert 1 + EPS + 1e-6 >= noise.max() > 1 + 0.8 * EPS
            noises.append(noise)
        # Experts receive the tokens without noise: if all are chosen, only the probs differ.
        for scores, output in zip(rank["scores"], rank["outputs"], strict=True):
            close(output.reshape(-1, WIDTH), _all_experts(given, scores), 1e-6, "output")
    for number, noise in enumerate(noises):  # each time, and on each rank, the noise is different
        assert all(abs(noise - other).max() > 0.1 for other in noises[:number])


def _noise_in_bf16(sizes: list[float]) -> list[numpy.ndarray]:
    """The noise that the router of a bf16 layer sees, for each size, with tokens of ones."""
    seed_ranks(7, initialize_groups(make_config({}).parallel))
    seen: list[numpy.ndarray] = []
    for eps in sizes:
        case = Case(topk(k=EXPERTS, aux=0.0, z=0.0, moe_input_jitter_eps=eps), tokens=1024)
        given = values(case) | {"w_router_ED": numpy.eye(EXPERTS, WIDTH)}
        layer = build(case, given, torch.bfloat16, "reference")
        choices = layer.choose(torch.ones(case.tokens, WIDTH, dtype=torch.bfloat16), Tokens(1))
        seen.append(choices.scores_TE.detach().numpy())
    destroy_groups()
    return seen


def test_jitter_of_a_bf16_layer_is_no_coarser():
    """In bf16 noise of 0.001 would round to 1, and noise of 0.01 would exceed its bounds."""
    sizes = [0.001, 0.01, EPS]
    (noises,) = run_distributed(1, _noise_in_bf16, sizes)
    for eps, noise in zip(sizes, noises, strict=True):
        assert noise.dtype == numpy.float32
        assert abs(noise - 1).max() <= eps + 1e-7
        # A uniform distribution has a standard deviation of eps / sqrt(3).
        assert noise.std() == pytest.approx(eps / 3**0.5, rel=0.05)
        assert noise.mean() == pytest.approx(1, abs=0.05 * eps)
        assert len(numpy.unique(noise)) > 0.9 * noise.size


def _all_experts(given: dict[str, numpy.ndarray], scores: numpy.ndarray) -> numpy.ndarray:
    gate_up, out = given["experts.w_gate_up_LD2F"], given["experts.w_out_LFD"]
    rows = []
    for x_D, row in zip(given["x"].reshape(-1, WIDTH), scores, strict=True):
        experts = [
            swiglu_expert(x_D, gate_up[e, :, 0], gate_up[e, :, 1], out[e]) for e in range(EXPERTS)
        ]
        rows.append(softmax(row.astype("float64")) @ experts)
    return numpy.array(rows)


def test_a_recomputed_forward_pass_counts_once():
    case = CASES["topk, balanced by bias"]
    given = values(case)
    layer = build(case, given, torch.float64, "reference")
    with torch.no_grad():
        layer(torch.from_numpy(given["x"]))
    assert layer.load.counts.sum() == 0
    run(layer, given, direction(case))
    wanted = oracle_load(case, given)
    assert layer.load.counts.tolist() == [share * case.tokens for share in wanted] + [case.tokens]
    layer.eval()
    layer(torch.from_numpy(given["x"]))
    assert layer.load.counts[-1] == case.tokens


def oracle_load(case: Case, given: dict[str, numpy.ndarray]) -> list[float]:
    return losses.load(expected_routing(case, given)[0])


def _steps(selection: Any, steps: int) -> list[tuple[Any, Any]]:
    """Loads and biases after each step, if the world is one data-parallel group."""
    case = Case(selection)
    given = values(case)
    layer = build(case, given, torch.float64, "reference")
    layer.context = replace(
        layer.context, groups=replace(layer.context.groups, tp_dp_cp=dist.group.WORLD)
    )
    seen = []
    for _ in range(steps):
        run(layer, given, direction(case))
        layer.after_step()
        bias = None if layer.bias is None else layer.bias.bias_E.tolist()
        seen.append((layer.load.share_E.tolist(), bias))
    return seen


@pytest.mark.parametrize("selection", [topk(**BIASED), aoe(**BIASED)], ids=["topk", "aoe"])
def test_the_bias_follows_the_load(selection):
    (seen,) = run_distributed(1, _steps, replace(selection, moe_router_bias_update_rate=0.125), 4)
    bias = [0.0] * EXPERTS
    for load, found in seen:
        case = Case(selection, balance=tuple(bias))
        wanted = oracle_load(case, values(case))
        numpy.testing.assert_allclose(load, wanted, rtol=1e-6)
        mean = sum(wanted) / EXPERTS
        bias = [b + 0.125 * numpy.sign(mean - f) for b, f in zip(bias, wanted, strict=True)]
        assert found == bias
    assert len({tuple(load) for load, _ in seen}) > 1  # the bias changed the choices


def test_the_global_loss_takes_the_loads_of_the_step_before():
    (seen,) = run_distributed(1, _steps, topk(**GLOBAL), 2)
    case = Case(topk(**GLOBAL))
    for load, bias in seen:
        numpy.testing.assert_allclose(load, oracle_load(case, values(case)), rtol=1e-6)
        assert bias is None


RECORDED = {
    "topk": {"load_balancing_loss": losses.load_balancing, "z_loss": lambda r: losses.z(r.scores)},
    "topk, aux loss of sequences": {
        "load_balancing_loss": functools.partial(losses.sequence_load_balancing, sequences=2),
        "z_loss": lambda r: losses.z(r.scores),
    },
    "aoe, importance loss": {"importance_loss": losses.importance},
    "aoe_top_p": {
        "load_balancing_loss": losses.load_balancing,
        "entropy_loss": losses.entropy,
    },
    "aoe_expert_choice, raw": {},
}


@pytest.mark.parametrize("name", RECORDED)
def test_losses_are_recorded_without_their_weights(name):
    case, given = CASES[name], values(CASES[name])
    layer = build(case, given, torch.float64, "reference")
    run(layer, given, direction(case))
    routing, _ = expected_routing(case, given)
    found = {key: value for key, value in counted(layer).items() if key.endswith("_loss")}
    wanted = {key: of(routing) for key, of in RECORDED[name].items()}
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("selection", [topk(), aoe(), uoe(), expert_choice(), aoe_expert_choice()])
def test_of_experts_with_equal_scores_the_first_compute(selection, training):
    takes_tokens = training and isinstance(selection, ExpertsChoose)
    case = Case(selection, training=training)
    layer = build(case, values(case), torch.float32, "native")
    choices = layer.choose(torch.zeros(case.tokens, WIDTH), Tokens(1))
    first = [list(range(EXPERTS)), [-1] * EXPERTS] if takes_tokens else [[0, 1]]
    assert all(row in first for row in choices.experts_TK.tolist())
