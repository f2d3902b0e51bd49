"""Thinned curves keep what a reader looks for: spikes, gaps and ends."""

import numpy as np
import pytest

from moe_parallel.analysis.report.thinning import bucket_means, slices_of, thinned


def test_a_short_curve_keeps_every_point():
    assert thinned(np.arange(5.0), 5).tolist() == [0, 1, 2, 3, 4]
    assert thinned(np.zeros(0)).tolist() == []


@pytest.mark.parametrize("count", [31, 1000, 98_765])
def test_spikes_gaps_and_ends_stay(count):
    values = np.sin(np.arange(count) / 50)
    spikes = [count // 3, count // 2, count - 7]
    values[spikes] = [40, -50, 60]
    gap = 2 * count // 5
    values[gap] = np.nan
    places = thinned(values, 30)
    assert len(places) <= 30 and (np.diff(places) > 0).all()
    assert {0, count - 1, gap, *spikes} <= set(places.tolist())
    infinite = np.where(np.arange(count) == 9, np.inf, values)
    assert 9 in thinned(infinite, 30)


def test_each_bucket_keeps_its_extremes():
    values = np.random.default_rng(0).normal(size=300)
    places = set(thinned(values, 32).tolist())
    for part in np.array_split(np.arange(300), 10):
        assert {part[values[part].argmin()], part[values[part].argmax()]} <= places


def test_buckets_cover_everything_once():
    for count, most in [(1, 5), (5, 5), (7, 3), (1000, 60)]:
        parts = slices_of(count, most)
        covered = [place for part in parts for place in range(part.start, part.stop)]
        assert covered == list(range(count)) and len(parts) == min(count, most)


def test_means_leave_out_what_is_not_finite():
    values = np.array([[1.0, np.nan], [3.0, np.nan], [np.inf, 5.0]])
    means = bucket_means(values, [slice(0, 2), slice(2, 3)])
    assert means[0, 0] == 2 and means[1, 1] == 5
    assert np.isnan(means[0, 1]) and np.isnan(means[1, 0])
