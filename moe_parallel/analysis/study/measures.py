"""The numbers of one run, their spread over the runs of a contender, and the tests of differences.

    NAME/loss, NAME/bits_per_byte    on held-out domain NAME, at the end; also the other losses of
                                     an evaluation (NAME/loss_...)
    train_loss                       nats per token, mean over the end
    experts_per_token                mean over layers and domains of the last evaluation
    ent_load, ent_conf               nats, mean over layers, in training at the end
    max_minus_min_load_sum           shares of choices, summed over layers, in training at the end
    output_rms                       of the MoE layers' outputs in the first iteration, mean over
                                     layers
    utilisation                      share of experts above a weight of 2 / E, mean over layers
    dropped_share                    share of all choices in training that were dropped
    mutual_information               of expert and domain, nats, mean over layers, last evaluation
    tokens_per_second                median of the logged intervals, without the first tenth
    consumed_tokens                  tokens read in training
    peak_memory_bytes                of the rank with the most: on its GPU, or resident on the host

"The end" is the last tenth of the logged iterations. A measure that a system does not have has no
entry.

The unit of a test is a seed. D_j is a contender's loss minus the reference's with seed j, j = 1..m,
with mean D and sample standard deviation s; t has m - 1 degrees of freedom.

    interval      D -+ t_(1 + level) / 2 * s / sqrt(m)
    difference    p = P(|t| >= |D| sqrt(m) / s), two-sided. Beyond the margin M: with |D| - M
    equivalence   two one-sided tests (TOST; Schuirmann 1987) of D <= -M and D >= M. p is the larger
                  of the two, and p < .05 exactly if the 90% interval lies inside (-M, M)
    Holm (1979)   of k sorted p-values the i-th (from 1) times k - i + 1, at most 1, never below the
                  one before: below .05, the chance of any false difference among all k is < .05
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from moe_parallel.analysis.routing import mutual_information
from moe_parallel.analysis.run_history import RunHistory, per_layer
from moe_parallel.optional import import_optional

RunMeasures = dict[str, float]
LEVEL = 0.05  # of every test
_Name = TypeVar("_Name", bound=Hashable)


def measures(history: RunHistory) -> RunMeasures:
    """The measures of a run, without those that are not finite or not recorded."""
    values: dict[str, float | None] = {
        f"{domain}/{name}": value
        for domain, reading in history.final.items()
        for name, value in reading.items()
        if name != "layers" and (value is None or isinstance(value, (int, float)))
    }
    if history.training:
        values |= _of_training(history)
    values["experts_per_token"] = _mean(list(history.held_out("experts_per_token").values()))
    counts = list(history.held_out("tokens_per_expert").values())
    if len(counts) > 1 and all(counts_GE.sum(axis=1).all() for counts_GE in counts):
        values["mutual_information"] = float(mutual_information(np.stack(counts)).mean())
    return {name: v for name, v in values.items() if v is not None and math.isfinite(v)}


def _of_training(history: RunHistory) -> dict[str, float | None]:
    speeds = [record["tokens_per_second"] for record in history.training]
    peaks = [r["peak_memory_bytes"] for r in history.training if "peak_memory_bytes" in r]
    first = per_layer(history.training[0]["layers"], "output_rms")

    def at_the_end(measure: str) -> list[np.ndarray]:
        found = [per_layer(record["layers"], measure) for record in history.end]
        return [values_G for values_G in found if values_G is not None]

    return {
        "train_loss": _mean([record["lm_loss"] for record in history.end]),
        "tokens_per_second": statistics.median(speeds[math.ceil((len(speeds) - 1) / 10) :]),
        "consumed_tokens": history.training[-1]["consumed_tokens"],
        "dropped_share": _dropped_share(history),
        "peak_memory_bytes": max(peaks, default=None),
        "output_rms": None if first is None else float(first.mean()),
        **{name: _mean(at_the_end(name)) for name in ("ent_load", "ent_conf", "utilisation")},
        "max_minus_min_load_sum": _mean([gaps.sum() for gaps in at_the_end("max_minus_min_load")]),
    }


def _mean(values: Sequence[float | np.ndarray | None]) -> float | None:
    if not values or any(value is None for value in values):
        return None
    return float(np.mean([np.mean(value) for value in values if value is not None]))


def _dropped_share(history: RunHistory) -> float | None:
    layers = [layer for record in history.training for layer in record["layers"]]
    if not layers or any("tokens_dropped" not in layer for layer in layers):
        return None
    choices = sum(sum(layer["tokens_per_expert"]) for layer in layers)
    return sum(layer["tokens_dropped"] for layer in layers) / choices if choices else None


def judged_loss(numbers: RunMeasures, loss: str) -> float | None:
    """The held-out loss by which a run is judged: the mean over domains of the evaluation's `loss`,
    in nats per token. None: the run does not have it, or it is not finite."""
    found = [value for name, value in numbers.items() if name.partition("/")[2] == loss]
    return statistics.fmean(found) if found else None


@dataclass(frozen=True)
class Spread:
    """The spread over the runs of a contender. `deviation`: sample standard deviation; None for a
    single run."""

    mean: float
    deviation: float | None
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """`values`: at least one."""
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), deviation, min(values), max(values), len(values))


def spreads(runs: Sequence[RunMeasures]) -> dict[str, Spread]:
    """The spread of each measure over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: Spread.of([run[name] for run in runs if name in run]) for name in names}


def paired_differences(
    runs: Mapping[int, RunMeasures], reference: Mapping[int, RunMeasures], measure: str
) -> Spread | None:
    """The spread of the differences between runs with the same seed, which read the same text in
    the same order. None if there are none."""
    differences = [
        run[measure] - reference[seed][measure]
        for seed, run in runs.items()
        if measure in run and measure in reference.get(seed, {})
    ]
    return Spread.of(differences) if differences else None


def student() -> Any:
    """Student's t distribution of scipy. Raises InputError if scipy is not installed."""
    return import_optional("scipy.stats", "study: margin").t


@dataclass(frozen=True)
class PairedTest:
    """The statistics of at least two paired differences, in nats per token.

    low, high: the 95% interval; low_90, high_90: the 90% interval. The p-values, not corrected:
    `p` of no difference, `p_beyond` of a difference of at most the margin, `p_equivalent` of one of
    at least the margin.
    """

    mean: float
    deviation: float
    runs: int
    low: float
    high: float
    low_90: float
    high_90: float
    p: float
    p_beyond: float
    p_equivalent: float

    @classmethod
    def of(cls, differences: Sequence[float], margin: float) -> PairedTest:
        mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
        runs = len(differences)
        half, half_90 = (half_width(runs, level) * deviation for level in (0.95, 0.90))

        def tail(distance: float) -> float:
            """P(t >= distance / standard error). Without any spread, the distance decides."""
            if deviation == 0:
                return 0.5 if distance == 0 else 1.0 if distance < 0 else 0.0
            return float(student().sf(distance * math.sqrt(runs) / deviation, runs - 1))

        return cls(
            mean, deviation, runs, mean - half, mean + half, mean - half_90, mean + half_90,
            p=2 * tail(abs(mean)),
            p_beyond=min(1.0, 2 * tail(abs(mean) - margin)),
            p_equivalent=tail(margin - abs(mean)),
        )  # fmt: skip

    @property
    def is_equivalent(self) -> bool:
        return self.p_equivalent < LEVEL


def half_width(runs: int, level: float) -> float:
    """Half the width of the interval of the mean of `runs` differences, in their standard
    deviations: .95 for five runs at level .90."""
    return float(student().ppf((1 + level) / 2, runs - 1)) / math.sqrt(runs)


def holm(p_values: Mapping[_Name, float]) -> dict[_Name, float]:
    """The p-values, by name, corrected for multiple comparisons."""
    names = sorted(p_values, key=p_values.__getitem__)
    factors = np.arange(len(names), 0, -1)
    corrected = np.maximum.accumulate(factors * [p_values[name] for name in names]).clip(max=1)
    by_name = dict(zip(names, corrected.tolist(), strict=True))
    return {name: by_name[name] for name in p_values}
