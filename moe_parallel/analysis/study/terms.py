"""The terms on which contenders are equal: what a study makes equal before training, and measures
afterward.

    experts          experts per token, total parameters, tokens (the default)
    active           active parameters of the chosen experts; the experts' width is fitted
    active_compute   active parameters of all that computes for a token; likewise
    flops            FLOPs of the whole training; the number of iterations is fitted
    time             seconds of training; likewise, by the speed of the pilot runs

A contender whose measured value differs by more than the tolerance is reported, not compared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_parallel.analysis.study.contenders import DENSE, Contender, Options
from moe_parallel.analysis.study.measures import RunMeasures
from moe_parallel.errors import InputError

Counts = Mapping[str, Any]  # what tools/count_parameters.py prints
Count = Callable[[Contender], Counts]

FITTED_WITHIN = 0.01  # a contender this near is left as it is
_ITERATIONS = ("train_iters", "lr_warmup_iters", "lr_decay_iters", "lr_wsd_decay_iters")


@dataclass(frozen=True)
class Terms(ABC):
    """One kind of equality. `told`: what is equal, in words; `tolerance`: relative."""

    told: str
    tolerance: float
    equal_totals: bool = True
    equal_tokens: bool = True
    timed: bool = False  # the pilot runs must be finished before the others are planned

    def fit(self, contender: Contender, reference: Contender, count: Count) -> Options:
        """The options that make the contender equal to the reference. Raises InputError."""
        return {}

    @abstractmethod
    def value(self, contender: Contender, parameters: Counts, means: RunMeasures) -> float | None:
        """What is equal, as measured: from the counts at the measured experts per token, and the
        means over runs. None: the contender has no such number."""


class EqualExperts(Terms):
    def value(self, contender: Contender, parameters: Counts, means: RunMeasures) -> float | None:
        return None if contender.system == DENSE else means.get("experts_per_token")


@dataclass(frozen=True)
class EqualActive(Terms):
    reading: str = "active"

    def fit(self, contender: Contender, reference: Contender, count: Count) -> Options:
        target = _known(count(reference), self.reading, reference)
        option = "ffn_hidden_size" if contender.system == DENSE else "moe_ffn_hidden_size"
        config = contender.config
        width = config.moe.moe_ffn_hidden_size or config.model.ffn_hidden_size
        if contender.system == DENSE:
            width = config.model.ffn_hidden_size
        counted = _known(count(contender), self.reading, contender)
        if abs(counted / target - 1) <= FITTED_WITHIN:
            return {}
        # The count is linear in the width (for AoE nearly so): follow the line to the target.
        wider = _known(count(contender.with_options({option: 2 * width})), self.reading, contender)
        slope = (wider - counted) / width
        fitted = round(width + (target - counted) / slope) if slope > 0 else 0
        if fitted >= 1:
            options = {option: fitted}
            reached = _known(count(contender.with_options(options)), self.reading, contender)
            if abs(reached / target - 1) <= FITTED_WITHIN:
                return options
        raise InputError(
            f"contender {contender.name}: no width of its experts gives it the {target:,} "
            f"{self.told} of {reference.name}: leave it out"
        )

    def value(self, contender: Contender, parameters: Counts, means: RunMeasures) -> float | None:
        return parameters.get(self.reading)


class EqualFlops(Terms):
    def fit(self, contender: Contender, reference: Contender, count: Count) -> Options:
        ours, its = (_known(count(c), "flops_per_token", c) for c in (contender, reference))
        return fitted_iterations(contender, its / ours)

    def value(self, contender: Contender, parameters: Counts, means: RunMeasures) -> float | None:
        flops = parameters.get("flops_per_token")
        return None if flops is None else flops * means["consumed_tokens"]


class EqualTime(Terms):
    def value(self, contender: Contender, parameters: Counts, means: RunMeasures) -> float | None:
        return means["consumed_tokens"] / means["tokens_per_second"]


def fitted_iterations(contender: Contender, ratio: float) -> Options:
    """The numbers of iterations of training and of its schedule, times `ratio`."""
    if abs(ratio - 1) <= FITTED_WITHIN:
        return {}
    config = contender.config
    values = {"train_iters": config.training.train_iters} | {
        name: getattr(config.optimizer, name) for name in _ITERATIONS[1:]
    }
    return {name: round(value * ratio) for name, value in values.items() if value is not None}


def _known(counts: Counts, name: str, contender: Contender) -> int:
    if counts[name] is None:
        raise InputError(
            f"contender {contender.name}: training decides its experts per token, so it cannot be "
            "made equal before training: control their mean, or leave it out"
        )
    return int(counts[name])


TERMS: dict[str, Terms] = {
    "experts": EqualExperts("experts per token", 0.02),
    "active": EqualActive("active parameters", 0.02, equal_totals=False),
    "active_compute": EqualActive(
        "active parameters, all that computes", 0.02, equal_totals=False, reading="active_compute"
    ),
    "flops": EqualFlops("FLOPs of training", 0.02, equal_tokens=False),
    "time": EqualTime("seconds of training", 0.05, equal_tokens=False, timed=True),
}
