"""The two kinds of selections, worked by hand."""

import numpy as np

from moe_parallel.analysis.selections import ChosenExperts, MergedSelections

CHOSEN = ChosenExperts(
    layer=1,
    entropy_T=np.array([0.1, 0.2, 0.3], dtype=np.float32),
    dropped_T=np.array([0, 1, 0]),
    experts_TK=np.array([[2, 0], [-1, 3], [-1, -1]]),
    probs_TK=np.array([[0.25, 0.75], [0.9, 0.5], [0.1, 0.1]], dtype=np.float32),
    num_experts=4,
)
# Four experts: a weight above 1/2 is used.
MERGED = MergedSelections(
    layer=2,
    entropy_T=np.zeros(3, dtype=np.float32),
    dropped_T=np.zeros(3, dtype=int),
    weights_PE=np.array([[0.1, 0.6, 0.2, 0.1], [0.5, 0.3, 0.1, 0.1]], dtype=np.float32),
    merge_T=np.array([0, 1, 0]),
)


def test_chosen_experts():
    assert CHOSEN.shares_E().tolist() == [1, 0, 1, 1]
    assert CHOSEN.active_TE.tolist() == [
        [True, False, True, False], [False, False, False, True], [False] * 4,
    ]  # fmt: skip
    used, experts, weights = CHOSEN.slots()
    assert (used.tolist(), experts.tolist()) == ([2, 1, 0], [2, 0, 3])
    assert weights.tolist() == [0.25, 0.75, 0.5]
    assert CHOSEN.best_T().tolist() == [0, 3, -1]
    part = CHOSEN.of(np.array([1, 0]))
    assert part.experts_TK.tolist() == [[-1, 3], [2, 0]] and part.dropped_T.tolist() == [1, 0]
    assert part.active_TE.tolist() == CHOSEN.active_TE[[1, 0]].tolist()


def test_merged_experts():
    assert np.allclose(MERGED.shares_E(), [0.7, 1.5, 0.5, 0.3])
    assert MERGED.active_TE.tolist() == [
        [False, True, False, False], [False] * 4, [False, True, False, False],
    ]  # fmt: skip
    used, experts, weights = MERGED.slots()
    assert (used.tolist(), experts.tolist()) == ([1, 0, 1], [1, 1])
    assert np.allclose(weights, 0.6)
    assert MERGED.best_T().tolist() == [1, 0, 1]
    assert MERGED.of(np.array([1])).shares_E().tolist() == MERGED.weights_PE[1].tolist()
