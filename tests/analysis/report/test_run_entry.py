"""The curves, maps and numbers of a run, compared with its records."""

import base64
import json

import numpy as np
import pytest

from moe_parallel.analysis.report.numbers import bucket_means, slices_of, thinned
from moe_parallel.analysis.report.run_entry import (
    LAYER_VALUES,
    MAP_VALUES,
    curves_of,
    routing_of,
    tokens_and_hours,
)
from moe_parallel.analysis.run_history import RunHistory
from tests.analysis.synthetic import synthetic_run


def decoded(coded):
    values = np.frombuffer(base64.b64decode(coded["data"]), dtype=np.uint8).astype(float)
    return np.where(values == 255, np.nan, values / 254 * coded["top"]).reshape(coded["shape"])


def test_curves_are_the_records():
    records = synthetic_run(logged=20, layers=2, dropped=3)
    records[4]["grad_norm"] = None
    records[7]["machine"] = {"mfu": 0.25}
    for record in records:
        for layer in record["layers"]:
            layer["experts_per_token"], layer["utilisation"] = layer["layer"], 0.5
            layer["drawn_loss"] = layer["layer"]  # of a system that is not registered here
    curves = curves_of(RunHistory.from_records(records))
    iterations = [record["iteration"] for record in records]
    assert curves["train"]["x"] == iterations
    assert curves["train"]["y"] == pytest.approx([r["lm_loss"] for r in records], rel=1e-4)
    assert curves["loss/code"]["x"] == [50, 100, 150, 200]
    assert curves["grad_norm"]["y"][4] is None and curves["grad_norm"]["y"][3] == 1
    assert curves["mfu"] == {"x": [80], "y": [0.25]}
    assert curves["experts_per_token"]["y"] == curves["drawn_loss"]["y"] == [1.5] * 20
    assert curves["experts_used"]["y"] == [8] * 20  # half of two layers of 8
    layers = records[-1]["layers"]
    assert curves["ent_load"]["y"][-1] == pytest.approx(
        (layers[0]["ent_load"] + layers[1]["ent_load"]) / 2, rel=1e-4
    )
    busiest = max(8 * max(x["tokens_per_expert"]) / sum(x["tokens_per_expert"]) for x in layers)
    assert curves["imbalance"]["y"][-1] == pytest.approx(busiest, rel=1e-4)
    choices = sum(sum(layer["tokens_per_expert"]) for layer in layers)
    assert curves["dropped"]["y"][-1] == pytest.approx(6 / choices, rel=1e-4)
    json.dumps(curves, allow_nan=False)


def test_the_clock_goes_on_when_a_run_continues():
    records = synthetic_run(logged=6)
    elapsed = [3600, 7200, 1800, 3600, 1800, 3600]  # of three starts
    for record, seconds in zip(records, elapsed, strict=True):
        record["elapsed_seconds"] = seconds
    clock = tokens_and_hours(RunHistory.from_records(records))
    assert clock["hours"] == [1, 2, 2.5, 3, 3.5, 4]
    assert clock["iterations"] == [10, 20, 30, 40, 50, 60]
    assert clock["tokens"] == [r["consumed_tokens"] for r in records]


def test_the_maps_are_the_loads():
    records = synthetic_run(logged=30, layers=3, experts=4)
    routing = routing_of(RunHistory.from_records(records))
    assert routing["layers"] == [1, 2, 3] and routing["experts"] == 4
    load = decoded(routing["load"])
    assert load.shape == (30, 3, 4) and routing["iterations"][-1] == 300
    for moment in (0, 17, 29):
        counts = np.array([x["tokens_per_expert"] for x in records[moment]["layers"]], dtype=float)
        expected = counts / counts.mean(axis=1, keepdims=True)
        assert np.abs(load[moment] - expected).max() < 0.5 * 4 / 254 + 1e-9
    last = np.sum([[x["tokens_per_expert"] for x in r["layers"]] for r in records[-3:]], axis=0)
    assert np.allclose(routing["end"], last / last.mean(axis=1, keepdims=True), rtol=1e-4)
    assert routing["end_from"] == 280
    norms = decoded(routing["norms"])
    expected = [[x["norm_per_expert"] for x in r["layers"]] for r in records]
    assert np.abs(norms - expected).max() <= 0.5 * routing["norms"]["top"] / 254 + 1e-3


def test_a_large_run_stays_small():
    records = synthetic_run(logged=50, layers=48, experts=64, domains=())
    history = RunHistory.from_records(records)
    routing = routing_of(history)
    for name in ("load", "norms"):
        assert np.prod(routing[name]["shape"]) <= MAP_VALUES
    for name in ("ent_load", "ent_conf"):
        assert np.size(routing["by_layer"][name]) <= LAYER_VALUES
    assert len(json.dumps([curves_of(history), routing])) < 500_000


@pytest.mark.parametrize("count", [31, 98_765])
def test_spikes_gaps_and_ends_stay(count):
    values = np.sin(np.arange(count) / 50)
    spikes = [count // 3, count // 2, count - 7]
    values[spikes] = [40, -50, 60]
    gap = 2 * count // 5
    values[gap] = np.nan
    places = thinned(values, 30)
    assert len(places) <= 30 and (np.diff(places) > 0).all()
    assert {0, count - 1, gap, *spikes} <= set(places.tolist())
    assert thinned(values[:30], 30).tolist() == list(range(30))
    infinite = np.where(np.arange(count) == 9, np.inf, values)
    assert 9 in thinned(infinite, 30)


def test_buckets_cover_everything_once_and_leave_out_what_is_not_finite():
    for count, most in [(1, 5), (5, 5), (7, 3), (1000, 60)]:
        parts = slices_of(count, most)
        covered = [place for part in parts for place in range(part.start, part.stop)]
        assert covered == list(range(count)) and len(parts) == min(count, most)
    values = np.array([[1.0, np.nan], [3.0, np.nan], [np.inf, 5.0]])
    means = bucket_means(values, [slice(0, 2), slice(2, 3)])
    assert means[0, 0] == 2 and means[1, 1] == 5
    assert np.isnan(means[0, 1]) and np.isnan(means[1, 0])
