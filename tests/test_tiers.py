"""The selection of cases for the quick tier."""

import subprocess
import sys
import time
from itertools import combinations, product

import pytest

from tests.tiers import covering, rest_in_full

CROSSES = [
    list(product(range(16), range(4), range(4), "ab")),
    list(product("abc", "de")),
    [row for row in product(range(3), range(3), range(3)) if sum(row) != 4],  # some are impossible
    [("a",), ("b",)],
    [(), ()],
    [],
]


def pairs(rows):
    return {
        (*of, row[of[0]], row[of[1]]) for row in rows for of in combinations(range(len(row)), 2)
    }


@pytest.mark.parametrize("rows", CROSSES, ids=len)
def test_every_pair_that_there_is_is_covered(rows):
    assert pairs(rows[i] for i in covering(rows)) == pairs(rows)


@pytest.mark.parametrize("rows", CROSSES, ids=len)
def test_every_value_that_there_is_is_covered(rows):
    chosen = [rows[i] for i in covering(rows, strength=1)]
    for column in range(len(rows[0]) if rows else 0):
        assert {row[column] for row in chosen} == {row[column] for row in rows}


def test_rows_of_one_value_are_covered():
    assert covering(CROSSES[3]) == [0, 1]


def test_a_full_cross_needs_few_rows():
    rows = CROSSES[0]
    assert len(rows) == 512
    assert len(covering(rows)) <= 72  # no subset has fewer than 16 * 4
    assert len(covering(rows, strength=1)) == 16


def test_two_parameters_are_crossed_in_full():
    assert covering(CROSSES[1]) == list(range(6))


def test_what_is_not_named_is_left_to_the_full_tier():
    first, *rest = rest_in_full("abc", "a")
    assert first == "a"
    assert [(each.values, each.marks[0].name) for each in rest] == [
        (("b",), "full"),
        (("c",), "full"),
    ]


@pytest.mark.parametrize(("after", "ended"), [(-60, "1 skipped"), (60, "1 passed")])
def test_no_test_begins_when_the_time_is_over(after, ended):
    name = "tests/test_tiers.py::test_a_full_cross_needs_few_rows"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    command += ["--no-start-after", str(time.time() + after)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert ended in done.stdout.splitlines()[-1]
    assert ("no time was left for it" in done.stdout) == (after < 0)


def test_a_name_that_is_not_there_is_seen():
    with pytest.raises(AssertionError, match="not all among"):
        rest_in_full("abc", "d")


def test_tests_start_without_the_plugin_for_time_limits():
    """A GPU host may have pytest alone, and unknown settings are errors (--strict-config)."""
    command = [sys.executable, "-m", "pytest", "-p", "no:timeout", "--collect-only", "-q"]
    done = subprocess.run([*command, "tests/test_optional.py"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
