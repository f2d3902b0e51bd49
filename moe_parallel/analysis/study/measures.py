"""The numbers of one run, and their spread over the runs of a contender.

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
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moe_parallel.analysis.run_history import RunHistory, per_layer

RunMeasures = dict[str, float]


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


def judged_loss(numbers: RunMeasures, loss: str) -> float | None:
    """The held-out loss by which a run is judged: the mean over domains of the evaluation's `loss`,
    in nats per token. None: the run does not have it, or it is not finite."""
    found = [value for name, value in numbers.items() if name.partition("/")[2] == loss]
    return statistics.fmean(found) if found else None


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
    values["mutual_information"] = _mutual_information(history)
    return {name: v for name, v in values.items() if v is not None and math.isfinite(v)}


def _of_training(history: RunHistory) -> dict[str, float | None]:
    speeds = [record["tokens_per_second"] for record in history.training]
    values: dict[str, float | None] = {
        "train_loss": _mean([record["lm_loss"] for record in history.end]),
        "tokens_per_second": statistics.median(speeds[math.ceil((len(speeds) - 1) / 10) :]),
        "consumed_tokens": history.training[-1]["consumed_tokens"],
        "dropped_share": _dropped_share(history),
    }
    peaks = [r["peak_memory_bytes"] for r in history.training if "peak_memory_bytes" in r]
    values["peak_memory_bytes"] = max(peaks, default=None)
    first = per_layer(history.training[0]["layers"], "output_rms")
    values["output_rms"] = None if first is None else float(first.mean())
    for name in ("ent_load", "ent_conf", "utilisation"):
        values[name] = _mean(_at_the_end(history, name))
    gaps = [gaps_G.sum() for gaps_G in _at_the_end(history, "max_minus_min_load")]
    return values | {"max_minus_min_load_sum": _mean(gaps)}


def _at_the_end(history: RunHistory, measure: str) -> list[np.ndarray]:
    found = [per_layer(record["layers"], measure) for record in history.end]
    return [values_G for values_G in found if values_G is not None]


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


def _mutual_information(history: RunHistory) -> float | None:
    """I(expert; domain) in nats of a choice drawn at random, mean over layers.

    All domains are equally likely, whatever their size. Within a domain, the probability of an
    expert is its share of the choices (or its weight, if experts are merged). The result is 0 if
    all domains use the experts alike, and at most ln of the number of domains.
    """
    counts = list(history.held_out("tokens_per_expert").values())
    if len(counts) < 2:
        return None
    counts_DGE = np.stack(counts)
    totals_DG1 = counts_DGE.sum(axis=2, keepdims=True)
    if not totals_DG1.all():
        return None
    of_domain_DGE = counts_DGE / totals_DG1
    mean_GE = of_domain_DGE.mean(axis=0)
    ratio_DGE = np.divide(of_domain_DGE, mean_GE, where=of_domain_DGE > 0,
                          out=np.ones_like(of_domain_DGE))  # fmt: skip
    return float((of_domain_DGE * np.log(ratio_DGE)).sum(axis=2).mean())
