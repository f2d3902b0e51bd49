"""Which rank is slow, and why, from tables of times."""

import json

import pytest

from moe_parallel.telemetry.progress import Phase
from moe_parallel.telemetry.stragglers import Member, News, RankTimes, summary


def _rank(forward, rows=100, *, least=None, dispatch=0.5, reduce=0.25, data=0.0):
    """A rank that computes `forward` seconds in each of two steps, or `least` in the first."""
    steps = [
        dict.fromkeys(Phase, 0.0)
        | {Phase.DATA: data, Phase.FORWARD: own - data}
        | {Phase.DISPATCH: dispatch, Phase.REDUCE: reduce}
        for own in (forward if least is None else least, forward)
    ]
    return RankTimes.of(steps, 2 * rows)


def _slowest(ranks, stages=None):
    stages = stages or [0] * len(ranks)
    members = [Member(f"node{rank}", stage) for rank, stage in enumerate(stages)]
    return summary(ranks, members)["slowest"]


def test_a_summary_is_json_by_rank():
    ranks = [_rank(1.0, 100, dispatch=0.5, data=0.125), _rank(1.25, 150, dispatch=0.25)]
    found = summary(ranks, [Member("a", 0), Member("b", 0)])
    assert found == {
        "own_seconds": [1.0, 1.25],
        "data_seconds": [0.125, 0.0],
        "dispatch_seconds": [0.5, 0.25],
        "pipeline_seconds": [0.0, 0.0],
        "reduce_seconds": [0.25, 0.25],
        "rows": [100, 150],
        "slowest": {
            "rank": 1,
            "host": "b",
            "own_seconds": 1.25,
            "over_median": 1.25,
            "phase": "forward",
            "rows": 150,
            "rows_of_others": 100,
            "cause": "tokens",
        },
    }
    assert json.loads(json.dumps(found)) == found


CAUSES = {
    "twice as slow with equal rows": ([_rank(1), _rank(1), _rank(2), _rank(1)], 2, "host"),
    "twice the rows, 1.5 times as slow": ([_rank(1), _rank(1.5, 200), _rank(1)], 1, "tokens"),
    "twice the rows, 3 times as slow": ([_rank(1), _rank(3, 200), _rank(1)], 1, "host"),
    "fewer rows, slower": ([_rank(1), _rank(2, 50), _rank(1)], 1, "host"),
    "all rows": ([_rank(1, 0), _rank(5, 400)], 1, "tokens"),
    "a dense model": ([_rank(1, 0), _rank(5, 0)], 1, "host"),
    "a little slower": ([_rank(1), _rank(1.1), _rank(1)], 1, None),
    "slow in one step only": ([_rank(1), _rank(9, least=1), _rank(1)], 1, None),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_slow_host_and_a_hot_expert(name):
    ranks, rank, cause = CAUSES[name]
    found = _slowest(ranks)
    assert (found["rank"], found["host"], found["cause"]) == (rank, f"node{rank}", cause)


def test_ranks_are_compared_within_their_stage():
    ranks = [_rank(1), _rank(1.5), _rank(3), _rank(3)]
    assert _slowest(ranks, [0, 0, 1, 1])["rank"] == 1
    assert _slowest(ranks)["rank"] in (2, 3)
    assert _slowest(ranks, [0, 1, 2, 3]) is None
    assert _slowest([_rank(1)]) is None


def _named(rank=1, cause="host"):
    return {
        "rank": rank,
        "host": "node1",
        "own_seconds": 0.5,
        "over_median": 2.0,
        "phase": "forward",
        "rows": 300,
        "rows_of_others": 100,
        "cause": cause,
    }


def test_a_straggler_is_told_once_in_a_while():
    news = News()
    assert news.of(_named(), 10, 0.0) is None  # the first interval builds what others reuse
    assert news.of(_named(), 4, 1.0) is None
    assert news.of(_named(), 4, 2.0) == (
        "rank 1 on node1 is 2.00 times as slow as its peers (0.5 s of its own a step, most of the "
        "difference in forward): its host is slow"
    )
    assert news.of(_named(), 4, 3.0) is None
    assert news.of(_named(), 4, 600.0) is None
    assert news.of(_named(), 4, 603.0) is not None


def test_another_cause_is_told_at_once_and_a_rank_that_recovers_is_not():
    news = News()
    news.of(None, 10, 0.0)
    assert news.of(_named(), 10, 1.0) is not None
    text = news.of(_named(2, "tokens"), 10, 3.0)
    assert text.endswith("its experts receive 300 rows a step, and those of the others 100")
    for time, cause in enumerate(("host", None, "host")):
        assert news.of(_named(3, cause), 4, 4.0 + time) is None
