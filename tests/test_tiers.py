"""The selection of cases for the quick tier."""

import subprocess
import sys
from itertools import combinations, product

import pytest

from tests.tiers import Share, covering

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


def test_every_name_is_in_one_share_and_the_shares_are_even():
    names = [f"tests/test_x.py::test_y[{i}]" for i in range(800)]
    shares = [[name for name in names if Share(part, 8).holds(name)] for part in range(8)]
    assert sorted(name for share in shares for name in share) == sorted(names)
    assert all(70 <= len(share) <= 130 for share in shares)


def test_the_shares_of_a_file_are_its_full_tier():
    """Every share has the quick tier."""
    file = "tests/csrc/test_kernels.py"
    quick = "tests/test_tiers.py::test_every_name_is_in_one_share_and_the_shares_are_even"
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


def test_tests_start_without_the_plugin_for_time_limits():
    """A GPU host may have pytest alone, and unknown settings are errors (--strict-config)."""
    command = [sys.executable, "-m", "pytest", "-p", "no:timeout", "--collect-only", "-q"]
    done = subprocess.run([*command, "tests/test_optional.py"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
