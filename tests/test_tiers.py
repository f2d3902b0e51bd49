"""The selection of cases for the quick tier."""

import subprocess
import sys
from itertools import combinations, product

import pytest

from tests.tiers import Share, covering, rest_in_full

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


def test_every_name_is_in_one_share_and_the_shares_are_even():
    names = [f"tests/test_x.py::test_y[{i}]" for i in range(800)]
    shares = [[name for name in names if Share(part, 8).holds(name)] for part in range(8)]
    assert sorted(name for share in shares for name in share) == sorted(names)
    assert all(70 <= len(share) <= 130 for share in shares)


@pytest.mark.parametrize("text", ["8/8", "-1/8", "1", "a/b"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(ValueError):
        Share.parse(text)


def test_the_shares_of_a_file_are_its_full_tier():
    """Every share has the quick tier."""
    file = "tests/csrc/test_kernels.py"
    quick = "tests/test_tiers.py::test_rows_of_one_value_are_covered"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--full", file, quick]
    found = []
    for part in range(3):
        done = subprocess.run([*command, "--share", f"{part}/3"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        assert quick in done.stdout
        found += [line for line in done.stdout.splitlines() if line.startswith(f"{file}::")]
    assert sorted(found) == [
        f"{file}::test_on_aarch64",
        f"{file}::test_under_the_address_and_undefined_behavior_sanitizers",
    ]


def test_a_name_that_is_not_there_is_seen():
    with pytest.raises(AssertionError, match="not all among"):
        rest_in_full("abc", "d")


def test_tests_start_without_the_plugin_for_time_limits():
    """A GPU host may have pytest alone, and unknown settings are errors (--strict-config)."""
    command = [sys.executable, "-m", "pytest", "-p", "no:timeout", "--collect-only", "-q"]
    done = subprocess.run([*command, "tests/test_optional.py"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
