"""Segment-level expert choice as a layer, compared with an oracle; also split over ranks."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest

from moe_parallel.systems import SegmentExpertChoiceSelection
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
from tests.oracles import layers as layer_oracle
from tests.oracles import merging as oracle

LENGTH = 3


def selection(factor: float = 1.0, scores: str = "softmax") -> SegmentExpertChoiceSelection:
    return SegmentExpertChoiceSelection(
        moe_expert_choice_capacity_factor=factor,
        moe_expert_choice_scores=scores,
        lory_segment_length=LENGTH,
    )


def logits_of(given: Arrays, first: list[Any] | None = None) -> numpy.ndarray:
    """The logits that rank tokens; `first`: the first segments, if not their own."""
    x, router = given["x"], given["w_router_ED"]
    return oracle.segment_logits(x, router, LENGTH, first or oracle.first_logits(x, router, LENGTH))


def expected(given: Arrays, factor: float = 1.0, raw: bool = False) -> Callable[[Arrays], Any]:
    """The output as a function near `given`: the parts without a gradient stay constant."""
    first = oracle.first_logits(given["x"], given["w_router_ED"], LENGTH)
    ranked = logits_of(given)

    def output(moved: Arrays) -> numpy.ndarray:
        logits, x = logits_of(moved, first), moved["x"]
        routing, _ = oracle.segment_expert_choice(logits, LENGTH, factor, raw, ranked)
        x_TD = x.reshape(-1, x.shape[2])
        return layer_oracle.combine(x_TD, routing, experts(moved)).reshape(x.shape)

    return output


def experts(given: Arrays) -> list[Any]:
    gate_up, out = given["experts.w_gate_up_LD2F"], given["experts.w_out_LFD"]
    return [
        lambda x, e=e: layer_oracle.swiglu_expert(x, gate_up[e, :, 0], gate_up[e, :, 1], out[e])
        for e in range(EXPERTS)
    ]


@pytest.mark.parametrize("scores", ["raw", "softmax"])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_equals_the_transcription(factor, scores):
    given = values(8, 2)  # two segments of three tokens and one of two, twice
    wanted = expected(given, factor, raw=scores == "raw")
    layer = build(selection(factor, scores), given)
    output, gradients = run(layer, given, direction(given["x"]))
    close(output, wanted(given), 1e-6, "output")  # routers compute scores in fp32
    for key, slope in expected_slopes(wanted, given).items():
        close(layer_oracle.slopes(gradients[key]), slope, 2e-6, key)


def test_in_training_a_segment_competes_with_later_ones():
    given = values(12, 2)
    pairs = pairs_seen(build(selection(), given), given["x"])
    future = {(s, t) for s, b, t, other in pairs if s > t and b == other}
    assert any(s >= LENGTH for s, _ in future)  # the mean of a later segment took a place
    assert any(b != other for _, b, _, other in pairs)  # or a segment of another sequence did


def test_evaluation_sees_the_future_inside_the_first_segment_alone():
    given = values(12, 2)
    pairs = pairs_seen(build(selection(), given).eval(), given["x"])
    assert all(b == other for _, b, _, other in pairs)
    future = [(s, t) for s, _, t, _ in pairs if s > t]
    assert future and all(s < LENGTH for s, _ in future)


def test_the_first_segment_teaches_the_router_nothing():
    given = values(12, 2)
    for tokens in (slice(0, LENGTH), slice(LENGTH, None)):
        ways = numpy.zeros_like(given["x"])
        ways[tokens] = direction(ways)[tokens]
        _, gradients = run(build(selection(2.0), given), given, ways)
        assert (gradients["w_router_ED"] != 0).any() == (tokens.start == LENGTH)
