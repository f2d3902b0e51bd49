"""Layers that merge experts equal a per-token oracle, and depend only on the tokens they may."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest
import torch

from moe_parallel.config import MergedSelection
from moe_parallel.systems import LoryPrefixSelection, LorySelection, SmearSelection
from tests.layers.cases import close
from tests.layers.single import run
from tests.layers.whole_sequences import (
    EXPERTS,
    Arrays,
    build,
    direction,
    expected_slopes,
    pairs_seen,
    values,
)
from tests.oracles import merging as oracle
from tests.oracles.layers import slopes


def lory(length: int = 3, first: str = "own", inference: str = "segment") -> LorySelection:
    return LorySelection(length, first, inference)


def prefix(length: int = 3, first: str = "own") -> LoryPrefixSelection:
    return LoryPrefixSelection(length, first)


SMEAR = SmearSelection(smear_expert_dropout=0.0, smear_sees_the_future=True)


@dataclass(frozen=True)
class Case:
    selection: MergedSelection
    tokens: int = 7
    sequences: int = 2

    @property
    def given(self) -> Arrays:
        return values(self.tokens, self.sequences)


CASES = {
    "lory, a short last segment": Case(lory()),
    "lory, whole segments": Case(lory(2), tokens=6),
    "lory, uniform first segment": Case(lory(first="uniform")),
    "lory, one sequence": Case(lory(), sequences=1),
    "lory, a sequence shorter than a segment": Case(lory(8)),
    "lory, segments of one token": Case(lory(1), tokens=4),
    "prefix": Case(prefix()),
    "prefix, uniform first segment": Case(prefix(first="uniform")),
    "prefix, two segments": Case(prefix(), tokens=6),
    "prefix, one segment": Case(prefix(8)),
    "smear": Case(SMEAR),
}


def weights_of(selection: Any, given: Arrays, first: list[Any]) -> numpy.ndarray:
    """The weights with which the oracle merges for each token."""
    x, router = given["x"], given["w_router_ED"]
    if isinstance(selection, SmearSelection):
        return oracle.smear_weights(x, router)
    kind = isinstance(selection, LoryPrefixSelection)
    rule = oracle.prefix_weights if kind else oracle.lory_weights
    return rule(x, router, selection.lory_segment_length, first)


def first_of(selection: Any, given: Arrays) -> list[Any]:
    if isinstance(selection, SmearSelection):
        return []
    kind, length = selection.lory_first_segment, selection.lory_segment_length
    return oracle.first_weights(given["x"], given["w_router_ED"], length, kind)


def merged(given: Arrays, weights_SBE: numpy.ndarray) -> numpy.ndarray:
    experts = given["experts.w_gate_up_LD2F"], given["experts.w_out_LFD"]
    return oracle.merged_output(given["x"], weights_SBE, *experts)


@functools.cache
def expected(name: str) -> tuple[numpy.ndarray, Arrays]:
    selection, given = CASES[name].selection, CASES[name].given
    first = first_of(selection, given)  # constant, because its gradient is stopped

    def output(moved: Arrays) -> numpy.ndarray:
        return merged(moved, weights_of(selection, moved, first))

    return output(given), expected_slopes(output, given)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_transcription(name):
    given = CASES[name].given
    output, gradients = run(build(CASES[name].selection, given), given, direction(given["x"]))
    wanted, wanted_slopes = expected(name)
    close(output, wanted, 1e-12, "output")
    for key, slope in wanted_slopes.items():
        close(slopes(gradients[key]), slope, 1e-7, key)


@pytest.mark.parametrize("name", ["lory, a short last segment", "prefix", "smear"])
def test_bf16_is_close_to_fp32(name):
    rounded = {
        key: torch.from_numpy(value).bfloat16().double().numpy()
        for key, value in CASES[name].given.items()
    }
    ways = torch.from_numpy(direction(rounded["x"])).bfloat16().double().numpy()
    runs = [
        run(build(CASES[name].selection, rounded, dtype), rounded, ways)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    (output, gradients), (exact, exact_gradients) = runs
    close(output, exact, 2e-2, "output")
    for key, gradient in exact_gradients.items():
        close(gradients[key], gradient, 4e-2, key)


# Which tokens affect which outputs


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", [name for name in CASES if name != "smear"])
def test_future_tokens_are_seen_inside_the_first_segment_alone(name, training):
    case = CASES[name]
    layer = build(case.selection, case.given).train(training)
    pairs = pairs_seen(layer, case.given["x"])
    assert all(b == other for _, b, _, other in pairs)  # sequences do not affect each other
    future = [(source, target) for source, _, target, _ in pairs if source > target]
    length = min(case.selection.lory_segment_length, case.tokens)
    assert all(source < length for source, _ in future)
    own = case.selection.lory_first_segment == "own"
    assert len(future) == own * case.sequences * length * (length - 1) // 2


@pytest.mark.parametrize("name", [name for name in CASES if name != "smear"])
def test_the_loss_on_the_first_segment_teaches_the_router_nothing(name):
    case = CASES[name]
    length = case.selection.lory_segment_length
    for tokens in (slice(0, length), slice(length, None)):
        ways = numpy.zeros_like(case.given["x"])
        ways[tokens] = direction(ways)[tokens]
        _, gradients = run(build(case.selection, case.given), case.given, ways)
        taught = (gradients["w_router_ED"] != 0).any()
        assert taught == (tokens.start == length and case.tokens > length)


# Equal, single and trained experts


# Evaluation


@pytest.mark.parametrize("first", ["own", "uniform"])
def test_evaluation_by_prompt_routes_once(first):
    given = Case(lory()).given
    selection = lory(first=first, inference="prompt")
    layer = build(selection, given)
    x = torch.from_numpy(given["x"])
    trained, evaluated = layer.train()(x)[0], layer.eval()(x)[0]
    heads = first_of(selection, given)
    for output, rule in ((trained, oracle.lory_weights), (evaluated, oracle.prefix_weights)):
        wanted = merged(given, rule(given["x"], given["w_router_ED"], 3, heads))
        close(output.detach().numpy(), wanted, 1e-12, "output")


# SMEAR's expert dropout


def dropping(probability: float) -> SmearSelection:
    return replace(SMEAR, smear_expert_dropout=probability)


def merged_weights(selection: SmearSelection, given: Arrays, seed: int, training: bool) -> Any:
    """e of the sequences of a layer: [B, E]."""
    torch.manual_seed(seed)
    layer = build(selection, given).train(training)
    return layer.merges(torch.from_numpy(given["x"])).weights_MBE[0].detach()


def test_dropout_leaves_experts_out_and_renormalizes():
    given = values(5, 400)
    full = merged_weights(SMEAR, given, 0, True)
    some = merged_weights(dropping(0.3), given, 0, True)
    dropped = some == 0
    assert 0.27 < dropped.double().mean() < 0.33  # 1600 draws
    kept = full * ~dropped
    torch.testing.assert_close(some, kept / kept.sum(1, keepdim=True))
    assert merged_weights(dropping(0.3), given, 0, True).equal(some)
    assert not merged_weights(dropping(0.3), given, 1, True).equal(some)
    assert merged_weights(dropping(0.3), given, 0, False).equal(full)


def test_where_every_expert_is_dropped_none_is():
    given = values(5, 50)
    all_but_surely = merged_weights(dropping(0.999), given, 0, True)
    full = merged_weights(SMEAR, given, 0, True)
    torch.testing.assert_close(all_but_surely.sum(1), torch.ones(50).double())
    assert (all_but_surely == full).all(1).float().mean() > 0.9
    layer = build(dropping(0.999), given)
    _, gradients = run(layer, given, direction(given["x"]))
    assert all(numpy.isfinite(gradient).all() for gradient in gradients.values())


# Statistics


def test_statistics():
    case = CASES["lory, a short last segment"]
    layer = build(case.selection, case.given)
    run(layer, case.given, direction(case.given["x"]))
    (summary,) = layer.context.statistics.training.summaries()
    first = first_of(case.selection, case.given)
    e_TE = weights_of(case.selection, case.given, first).reshape(-1, EXPERTS)
    numpy.testing.assert_allclose(summary["routing_weight_per_expert"], e_TE.mean(0), rtol=1e-6)
    assert summary["utilisation"] == (e_TE.max(0) > 2 / EXPERTS).mean()
    entropy = -(e_TE * numpy.log(e_TE)).sum(1).mean()
    assert summary["ent_conf"] == pytest.approx(entropy, rel=1e-6)
    assert summary["tokens_dropped"] == 0
    assert summary["experts_per_token"] == pytest.approx(1.0)
