"""The cells of a scaling study."""

import pytest

from moe_parallel.analysis.scaling.grid import cells, parse_vary
from moe_parallel.errors import InputError
from tests.program import SMALL

OPTIONS = SMALL | {"data_path": ["data"], "vocab_size": 64}


def grid(nodes, vary=(), *, weak=False):
    return list(cells(OPTIONS, nodes, parse_vary(vary), ranks_per_node=2, weak=weak))


def test_every_number_of_nodes_has_every_combination():
    found = grid([1, 4], ["expert-model-parallel-size=1,2", "micro-batch-size=1,2"])
    assert len({each.name for each in found}) == 8
    assert [each.ranks for each in found] == [2] * 4 + [8] * 4
    assert found[1].options["micro_batch_size"] == 2
    assert found[2].options["expert_model_parallel_size"] == 2


@pytest.mark.parametrize(("weak", "batches"), [(False, [8, 8]), (True, [8, 24])])
def test_weak_scaling_multiplies_the_batch(weak, batches):
    found = grid([1, 3], weak=weak)
    assert [each.options["global_batch_size"] for each in found] == batches


@pytest.mark.parametrize(
    "word",
    [
        "micro-batch-size",
        "=1",
        "micro-batch-size=1,,2",
        "load=a/b",
        "lr={a: b",
        "lr=!!int x",
        "lr=" + "[" * 3000,
    ],
)
def test_a_wrong_vary_is_named(word):
    with pytest.raises(InputError, match="--vary"):
        parse_vary([word])


def test_a_flag_is_varied_once():
    with pytest.raises(InputError, match="twice"):
        parse_vary(["seed=1", "seed=2"])


def test_weak_scaling_needs_a_batch():
    with pytest.raises(InputError, match="global-batch-size"):
        list(cells({}, [1], {}, ranks_per_node=1, weak=True))


def test_a_cell_that_cannot_be_trained_says_why():
    first, second = grid([1], ["expert-model-parallel-size=2,8"])
    assert first.why_not() is None
    assert "expert-model-parallel-size" in (second.why_not() or "")


def test_wrong_options_are_no_matter_of_the_number_of_ranks():
    (cell,) = grid([1], ["expert-model-parallel-sise=2"])
    with pytest.raises(InputError, match="expert-model-parallel-sise"):
        cell.why_not()
