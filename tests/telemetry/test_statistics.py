"""Routing statistics: closed forms, accumulation, recompute, evaluation, sums over ranks."""

import json
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from moe_parallel.telemetry.statistics import (
    RoutingStatistics,
    RoutingTotals,
    ent_conf_sum,
    ent_load,
    load_shares,
    max_minus_min_load,
    rank_load,
)
from tests.distributed import run_distributed

CPU = torch.device("cpu")


def test_loads_by_hand():
    """10 tokens with K = 2: each chooses expert 0, and half of them each choose 1 and 2."""
    assert load_shares([10, 5, 5, 0]) == [0.5, 0.25, 0.25, 0]
    for counts, entropy, gap in [
        ([10, 5, 5, 0], 1.5 * math.log(2), 0.5),
        ([5] * 8, math.log(8), 0),
        ([0, 7, 0, 0], 0, 1),
        ([0, 0], 0, 0),
    ]:
        assert ent_load(counts) == pytest.approx(entropy, abs=1e-12)
        assert max_minus_min_load(counts) == gap


def test_confidence_by_hand():
    """The softmax of (ln 3, 0) is (3/4, 1/4)."""
    by_hand = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    for scores, entropy in [
        (torch.tensor([[math.log(3), 0.0]]), by_hand),
        (torch.zeros(3, 8), 3 * math.log(8)),
        (torch.tensor([[1000.0, 0.0], [-torch.inf, 0.0]]), 0),
        (torch.zeros(0, 4), 0),
    ]:
        assert ent_conf_sum(scores).item() == pytest.approx(entropy, rel=1e-6)


def micro_batch(generator: torch.Generator, tokens: int, experts: int = 4, k: int = 2) -> dict:
    scores = torch.rand(tokens, experts, generator=generator)
    chosen = scores.topk(k).indices
    return {
        "tokens_per_expert_E": torch.bincount(chosen.flatten(), minlength=experts),
        "dropped": tokens // 3,
        "scores_TE": scores,
        "norms_TE": scores,
    }


def record(statistics: RoutingStatistics, layer: int, **what: Any) -> None:
    """As a layer does in its forward pass."""
    totals = statistics.recipient()
    if totals is not None:
        totals.add(layer, **what)


def joined(batches: list[dict]) -> dict:
    return {
        "tokens_per_expert_E": sum(b["tokens_per_expert_E"] for b in batches),
        "dropped": sum(b["dropped"] for b in batches),
        "scores_TE": torch.cat([b["scores_TE"] for b in batches]),
        "norms_TE": torch.cat([b["norms_TE"] for b in batches]),
    }


def assert_same_summaries(actual: list[dict], expected: list[dict]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value == pytest.approx(other[key], rel=1e-6), key


def test_micro_batches_add_up_to_one_batch():
    generator = torch.Generator().manual_seed(1)
    batches = [micro_batch(generator, tokens) for tokens in (5, 1, 0, 12)]
    pieces, whole = RoutingStatistics(2, 4, CPU), RoutingStatistics(2, 4, CPU)
    for batch in batches:
        record(pieces, 2, **batch)
    record(whole, 2, **joined(batches))
    assert_same_summaries(pieces.training.summaries(), whole.training.summaries())


def test_summary_values():
    statistics = RoutingStatistics(3, 2, CPU)
    record(
        statistics,
        3,
        tokens_per_expert_E=torch.tensor([3, 1]),
        dropped=torch.tensor(1),
        scores_TE=torch.zeros(4, 2, dtype=torch.bfloat16),
        norms_TE=torch.tensor([[1.0, 2.0]] * 4, requires_grad=True),
        losses={"z_loss": torch.tensor(4.0)},
    )
    statistics.training.add_loss(3, "z_loss", torch.tensor(1.0))
    statistics.training.add_output(3, torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16))
    (summary,) = statistics.training.summaries()
    assert summary == {
        "layer": 3,
        "tokens_per_expert": [3, 1],
        "experts_per_token": 1.0,
        "tokens_dropped": 1,
        "ent_load": pytest.approx(2 * math.log(2) - 0.75 * math.log(3)),
        "ent_conf": pytest.approx(math.log(2)),
        "max_minus_min_load": 0.5,
        "norm_per_expert": [1.0, 2.0],
        "z_loss": 2.5,  # the mean of two micro-batches
        "output_rms": pytest.approx(math.sqrt(12.5)),
    }
    assert not statistics.training.sums_GC.requires_grad


def test_bytes_sent_to_other_ranks_are_told_by_the_token():
    statistics = RoutingStatistics(2, 2, CPU)
    batch = {"tokens_per_expert_E": torch.ones(2), "dropped": 0, "scores_TE": torch.zeros(4, 2)}
    for layer, sent in ((1, 100), (1, 20), (2, 0)):
        record(statistics, layer, **batch, wire_bytes=sent)
    with torch.no_grad():  # the first pass of a recomputation dispatches too, and does not count
        record(statistics, 1, **batch, wire_bytes=1000)
    first, second = statistics.training.summaries()
    assert first["wire_bytes_per_token"] == 120 / 8
    assert not {"wire_bytes_per_token", "norm_per_expert"} & second.keys()


@pytest.mark.parametrize("recompute", [False, True])
def test_recompute_is_counted_once(recompute):
    statistics = RoutingStatistics(1, 4, CPU)
    calls = []

    def forward(x):
        calls.append(torch.is_grad_enabled())
        record(statistics, 1, tokens_per_expert_E=torch.ones(4), dropped=0, scores_TE=x.detach())
        return x * 2

    x = torch.rand(3, 4, requires_grad=True)
    y = checkpoint(forward, x, use_reentrant=True) if recompute else forward(x)
    y.sum().backward()
    assert calls == ([False, True] if recompute else [True])
    assert statistics.training.summaries()[0]["tokens_per_expert"] == [1, 1, 1, 1]


def test_evaluation_is_kept_apart():
    generator = torch.Generator().manual_seed(2)
    statistics = RoutingStatistics(1, 4, CPU)
    trained, evaluated = micro_batch(generator, 5), micro_batch(generator, 7)
    record(statistics, 1, **trained)
    for _ in range(2):  # a second evaluation starts from zero
        with statistics.evaluating() as totals, torch.no_grad():
            record(statistics, 1, **evaluated)
    with torch.no_grad():
        record(statistics, 1, **evaluated)
    assert totals.summaries()[0]["tokens_per_expert"] == evaluated["tokens_per_expert_E"].tolist()
    with pytest.raises(RuntimeError, match="boom"), statistics.evaluating():
        raise RuntimeError("boom")
    record(statistics, 1, **trained)
    expected = (2 * trained["tokens_per_expert_E"]).tolist()
    assert statistics.training.summaries()[0]["tokens_per_expert"] == expected


def two_stages_of_two_ranks(rank: int) -> RoutingStatistics:
    """Ranks 0 and 1 hold layer 1, ranks 2 and 3 layer 2; every rank has its own tokens. All merge
    experts in layer 3."""
    generator = torch.Generator().manual_seed(rank)
    statistics = RoutingStatistics(3, 4, CPU)
    for tokens in (4 + rank, 3):
        record(statistics, 1 + rank // 2, **micro_batch(generator, tokens))
    weights_1E = torch.tensor([[0.9, 0.1, 0, 0]]) if rank else torch.full((1, 4), 0.25)
    statistics.training.add_merges(3, weights_1E, torch.tensor([1 + rank]))
    return statistics


def summaries_over_ranks() -> list[list[dict]]:
    rank = dist.get_rank()
    data_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = two_stages_of_two_ranks(rank)
    before = mine.training.summaries()
    reduced = mine.training.reduced([data_groups[rank // 2], stage_groups[rank % 2]])
    assert mine.training.summaries() == before
    return reduced.summaries()


def test_sum_over_ranks_equals_one_process():
    alone = RoutingStatistics(3, 4, CPU)
    for rank in range(4):
        alone.training.add_totals(two_stages_of_two_ranks(rank).training)
    expected = alone.training.summaries()
    assert [summary["layer"] for summary in expected] == [1, 2, 3]
    assert expected[2]["utilisation"] == 0.25  # the largest weights of all ranks
    for summaries in run_distributed(4, summaries_over_ranks):
        assert_same_summaries(summaries, expected)


def test_merged_experts_by_hand():
    statistics = RoutingStatistics(1, 4, CPU)
    weights = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.4, 0.4, 0.1, 0.1]])
    statistics.training.add_merges(1, weights, torch.tensor([8, 2]))
    statistics.training.add_merges(1, torch.tensor([[0.1, 0.2, 0.54, 0.16]]), torch.tensor([10]))
    (summary,) = statistics.training.summaries()
    # (8 * .7 + 2 * .4 + 10 * .1) / 20, ...
    assert summary["routing_weight_per_expert"] == pytest.approx([0.37, 0.18, 0.32, 0.13])
    assert summary["experts_per_token"] == pytest.approx(1.0)
    assert summary["tokens_per_expert"] == [7, 4, 6, 3]
    assert summary["utilisation"] == 0.5  # experts 0 and 2 were above 2 / 4 once

    def entropy(*weights: float) -> float:
        return -sum(weight * math.log(weight) for weight in weights)

    by_hand = 8 * entropy(0.7, 0.1, 0.1, 0.1) + 2 * entropy(0.4, 0.4, 0.1, 0.1)
    by_hand += 10 * entropy(0.1, 0.2, 0.54, 0.16)
    assert summary["ent_conf"] == pytest.approx(by_hand / 20)
    statistics.training.clear()
    assert statistics.training.summaries() == []
    assert statistics.training.peaks_GE.sum() == 0


def test_a_checkpoint_keeps_what_the_next_line_needs():
    statistics, again = RoutingStatistics(2, 4, CPU), RoutingStatistics(2, 4, CPU)
    record(statistics, 1, **micro_batch(torch.Generator().manual_seed(0), tokens=7))
    merged = torch.tensor([[0.7, 0.1, 0.1, 0.1]])
    statistics.training.add_merges(2, merged, torch.tensor([5]))
    again.training.load_state(json.loads(json.dumps(statistics.training.state())))
    assert again.training.summaries() == statistics.training.summaries()
    for each in (statistics, again):
        each.training.add_merges(2, torch.full((1, 4), 0.25), torch.tensor([5]))
        assert each.training.summaries()[1]["utilisation"] == 0.25  # the first was above 2 / 4


def test_numbers_of_the_host_are_in_the_state_and_go_with_it():
    """Tokens and wire bytes are added on the host; a state holds them, and a restored one only
    its own."""
    statistics = RoutingStatistics(2, 4, CPU)
    batch = micro_batch(torch.Generator().manual_seed(0), tokens=6)
    record(statistics, 2, **batch, wire_bytes=100)
    state = statistics.training.state()
    assert sum(row[RoutingTotals.TOKENS] for row in state["sums"]) == 6
    record(statistics, 2, **batch)
    statistics.training.load_state(state)
    (summary,) = statistics.training.summaries()
    assert summary["layer"] == 2 and summary["wire_bytes_per_token"] == pytest.approx(100 / 6)
    assert statistics.training.state() == state
    record(statistics, 1, **batch, wire_bytes=7)
    statistics.training.clear()
    assert not statistics.training.sums_GC.any()


def _layers(*counts):
    return [{"layer": n, "tokens_per_expert": of} for n, of in enumerate(counts, start=1)]


def test_rank_load():
    """Layer 1 has 30 and 10 of 40, layer 2 20 and 20. The mean rank has 20."""
    layers = _layers([10, 20, 5, 5], [0, 20, 20, 0])
    expected = {"overload": 1.5, "layer": 1, "expert_parallel_rank": 0}
    assert rank_load(layers, 2) == expected
    worst = {"overload": 4, "layer": 2, "expert_parallel_rank": 3}
    assert rank_load(_layers([0, 0, 0, 0], [0, 0, 0, 9]), 4) == worst
    for layers, ranks in [(_layers([3, 1]), 1), ([], 2), (_layers([0, 0]), 2)]:
        assert rank_load(layers, ranks) is None
