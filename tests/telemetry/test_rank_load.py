"""The load of expert-parallel ranks, worked by hand."""

import pytest

from moe_parallel.telemetry.rank_load import rank_load


def _layers(*counts):
    return [{"layer": n, "tokens_per_expert": of} for n, of in enumerate(counts, start=1)]


def test_by_hand():
    # Layer 1: 30 and 10 of 40. Layer 2: 20 and 20. The mean rank has 20.
    layers = _layers([10, 20, 5, 5], [0, 20, 20, 0])
    assert rank_load(layers, 2) == {
        "overload": 1.5,
        "layer": 1,
        "expert_parallel_rank": 0,
        "p50": 1.0,  # of 0.5, 1, 1, 1.5
        "p90": 1.5,
        "p99": 1.5,
    }


def test_the_worst_case():
    load = rank_load(_layers([0, 0, 0, 0], [0, 0, 0, 9]), 4)
    assert (load["overload"], load["layer"], load["expert_parallel_rank"]) == (4, 2, 3)


@pytest.mark.parametrize(("layers", "ranks"), [(_layers([3, 1]), 1), ([], 2), (_layers([0, 0]), 2)])
def test_nothing_to_compare(layers, ranks):
    assert rank_load(layers, ranks) is None
