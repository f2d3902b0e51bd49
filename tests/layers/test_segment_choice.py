"""Segment-level expert choice as a layer, compared with an oracle; also split over ranks."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import distributed as dist

from moe_parallel.config import make_config
from moe_parallel.parallel import destroy_groups, initialize_groups
from moe_parallel.systems import SegmentExpertChoiceSelection
from tests.distributed import run_distributed
from tests.layers.whole_sequences import (
    EXPERTS,
    Arrays,
    build,
    close,
    direction,
    expected_slopes,
    pairs_seen,
    run,
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
    output, gradients = run(layer, given["x"], direction(given["x"]))
    close(output, wanted(given), 1e-6, "output")  # routers compute scores in fp32
    for key, slope in expected_slopes(wanted, given).items():
        close(layer_oracle.slopes(gradients[key]), slope, 2e-6, key)


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
def test_every_expert_takes_as_many_segments(factor):
    given = values(12, 4)  # 16 segments
    layer = build(selection(factor), given)
    run(layer, given["x"], direction(given["x"]))
    (summary,) = layer.context.statistics.training.summaries()
    assert summary["tokens_per_expert"] == [factor * 16 / EXPERTS * LENGTH] * EXPERTS
    assert summary["experts_per_token"] == factor


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


def test_evaluation_gives_each_segment_its_best_experts():
    given = values(12, 2)
    layer = build(selection(2.0), given).eval()
    with layer.context.statistics.evaluating() as totals, torch.no_grad():
        layer(torch.from_numpy(given["x"]))
    (summary,) = totals.summaries()
    assert summary["experts_per_token"] == 2.0
    best = numpy.argsort(-logits_of(given), axis=2)[..., :2].flatten()
    assert summary["tokens_per_expert"] == [(best == e).sum() for e in range(EXPERTS)]


def test_the_first_segment_teaches_the_router_nothing():
    given = values(12, 2)
    for tokens in (slice(0, LENGTH), slice(LENGTH, None)):
        ways = numpy.zeros_like(given["x"])
        ways[tokens] = direction(ways)[tokens]
        _, gradients = run(build(selection(2.0), given), given["x"], ways)
        assert (gradients["w_router_ED"] != 0).any() == (tokens.start == LENGTH)


def _on_this_rank(given: Arrays, layout: dict[str, int], sequence_parallel: bool) -> Any:
    groups = initialize_groups(make_config(layout).parallel)
    layer = build(selection(2.0), given, groups=groups, sequence_parallel=sequence_parallel)
    x, ways = given["x"], direction(given["x"])
    if sequence_parallel:
        x, ways = (numpy.split(whole, groups.tp.size())[groups.tp.rank()] for whole in (x, ways))
    output, gradients = run(layer, x, ways)
    if sequence_parallel:  # as Megatron-Core does at the end of a step
        dist.all_reduce(torch.from_numpy(gradients["w_router_ED"]))
    layers = layer.context.statistics.training.reduced([None]).summaries()
    dist.barrier()
    destroy_groups()
    return output, gradients["x"], gradients["w_router_ED"], layers


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_that_share_segments_equal_one(sequence_parallel):
    given = values(8, 2)  # the second segment spans the ranks
    ((output, of_x, of_router, layers),) = run_distributed(1, _on_this_rank, given, {}, False)
    layout = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    ranks = run_distributed(2, _on_this_rank, given, layout, sequence_parallel)
    outputs, gradients = ([rank[i] for rank in ranks] for i in (0, 1))
    if sequence_parallel:
        outputs, gradients = [numpy.concatenate(outputs)], [numpy.concatenate(gradients)]
    close(outputs[0], output, 1e-6, "output")
    close(gradients[0], of_x, 2e-6, "x")
    for _, _, gradient, counted in ranks:
        close(gradient, of_router, 2e-6, "w_router_ED")
        assert counted[0]["tokens_per_expert"] == layers[0]["tokens_per_expert"]
