"""Intervals, tests of equivalence and Holm's correction, with numbers worked by hand."""

import math
import sys

import pytest

from moe_parallel.analysis.study.inference import PairedTest, half_width, holm, student
from moe_parallel.errors import InputError


def test_an_interval_of_three_differences():
    """Mean 2, deviation 1, so the standard error is 1/sqrt(3). t_.975 = 4.30265 and t_.95 =
    2.91999 with two degrees of freedom, from any printed table."""
    test = PairedTest.of([1.0, 2.0, 3.0], margin=1.0)
    assert (test.mean, test.deviation, test.runs) == (2.0, 1.0, 3)
    assert (test.low, test.high) == pytest.approx((2 - 2.48413, 2 + 2.48413), abs=1e-4)
    assert (test.low_90, test.high_90) == pytest.approx((2 - 1.68585, 2 + 1.68585), abs=1e-4)


def test_p_values_of_two_differences_are_those_of_cauchy():
    """With one degree of freedom P(t >= x) = 1/2 - atan(x)/pi. Mean 2, standard error 1."""
    test = PairedTest.of([1.0, 3.0], margin=0.5)

    def tail(x: float) -> float:
        return 0.5 - math.atan(x) / math.pi

    assert test.p == pytest.approx(2 * tail(2.0))
    assert test.p_beyond == pytest.approx(2 * tail(1.5))
    assert test.p_equivalent == pytest.approx(tail(-1.5))
    assert PairedTest.of([-3.0, -1.0], margin=0.5).p == pytest.approx(test.p)


@pytest.mark.parametrize(("runs", "factor"), [(3, 1.69), (5, 0.95), (10, 0.58)])
def test_half_widths_that_the_literature_prints(runs, factor):
    assert half_width(runs, 0.90) == pytest.approx(factor, abs=0.005)


def test_equivalence_is_decided_by_the_90_percent_interval():
    """At a margin that the interval just touches p is .05, whichever side it touches."""
    differences = [0.001, 0.004, -0.002, 0.003, 0.0015]
    reach = PairedTest.of(differences, margin=1.0).high_90
    assert PairedTest.of(differences, reach).p_equivalent == pytest.approx(0.05)
    assert PairedTest.of(differences, reach * 1.001).is_equivalent
    assert not PairedTest.of(differences, reach * 0.999).is_equivalent
    mirrored = [-each for each in differences]
    assert PairedTest.of(mirrored, reach).p_equivalent == pytest.approx(0.05)
    assert PairedTest.of(mirrored, reach * 1.001).is_equivalent


def test_no_difference_found_is_not_equivalence():
    test = PairedTest.of([0.2, -0.1, 0.05], margin=0.01)
    assert test.p > 0.05 and not test.is_equivalent


@pytest.mark.parametrize(
    ("value", "p", "p_beyond", "p_equivalent"),
    [(0.0, 1.0, 1.0, 0.0), (0.5, 0.0, 1.0, 0.0), (2.0, 0.0, 0.0, 1.0)],
)
def test_without_any_spread_the_mean_decides(value, p, p_beyond, p_equivalent):
    test = PairedTest.of([value, value], margin=1.0)
    assert (test.p, test.p_beyond, test.p_equivalent) == (p, p_beyond, p_equivalent)
    assert test.low == test.high == value


def test_holm():
    """Three times .01; two times .03; .04 is raised to the .06 before it."""
    corrected = holm({"b": 0.04, "a": 0.01, "c": 0.03})
    assert list(corrected) == ["b", "a", "c"]
    assert corrected == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.6, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


def test_scipy_is_named_if_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(InputError, match="study: margin needs scipy, which .* pip install scipy"):
        student()
