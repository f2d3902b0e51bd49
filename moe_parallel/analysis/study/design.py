"""The design of a study: what it holds equal, tunes and tests, stated before its first run.

It is the section `study` of the study's file:

    study:
      selections: [topk, aoe, dense]
      seeds: {default: 3, topk: 5, aoe: 5}
      equal: experts
      lr-grid: [1/3, 1, 3]
      pilot-seed: 99
      balance-grid: {topk:moe-aux-loss-coeff: [0.001, 0.1]}
      margin: 0.01

`equal` names the terms: what a study makes equal before training, and measures afterward. A
contender whose measured value differs by more than EQUAL_WITHIN is reported, not compared.

    experts          experts per token, total parameters, tokens (the default)
    active           active parameters of the chosen experts; the experts' width is fitted
    active_compute   active parameters of all that computes for a token; likewise
    flops            FLOPs of the whole training; the number of iterations is fitted
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from moe_parallel.analysis.study.contenders import DENSE, Contender, Options
from moe_parallel.analysis.study.measures import RunMeasures
from moe_parallel.config.message import as_typed, shown
from moe_parallel.errors import InputError

SECTION = "study"
#: The losses of an evaluation by which contenders may be judged.
LOSSES = ("loss", "loss_after_first_part")
FITTED_WITHIN = 0.01  # a contender this near is left as it is
EQUAL_WITHIN = 0.02  # of the reference's value, as measured
_DEFAULT = "default"  # of the numbers of seeds: that of the contenders without one of their own
_ITERATIONS = ("lr_warmup_iters", "lr_decay_iters", "lr_wsd_decay_iters")

Counts = Mapping[str, Any]  # what tools/count_parameters.py prints
Count = Callable[[Contender], Counts]


@dataclass(frozen=True)
class Terms:
    """One kind of equality. `told`: what is equal, in words. `reading`: its name in the counts;
    None: the experts per token. `fits`: "width" of the experts or "iterations"."""

    told: str
    reading: str | None = None
    fits: str | None = None

    def fit(self, contender: Contender, reference: Contender, count: Count) -> Options:
        """The options that make the contender equal to the reference. Raises InputError."""
        if self.reading is None:
            return {}
        target, now = self._known(count, reference), self._known(count, contender)
        if abs(now / target - 1) <= FITTED_WITHIN:
            return {}
        config = contender.config
        if self.fits == "iterations":
            values = {"train_iters": config.training.train_iters}
            values |= {name: getattr(config.optimizer, name) for name in _ITERATIONS}
            return {k: round(v * target / now) for k, v in values.items() if v is not None}
        option, width = "ffn_hidden_size", config.model.ffn_hidden_size
        if contender.system != DENSE:
            option, width = "moe_ffn_hidden_size", config.moe.moe_ffn_hidden_size or width

        def counted(width: int) -> int:
            return self._known(count, contender.with_options({option: width}))

        # The count is linear in the width (for AoE nearly so): follow the line to the target.
        slope = (counted(2 * width) - now) / width
        fitted = round(width + (target - now) / slope) if slope > 0 else 0
        if fitted >= 1 and abs(counted(fitted) / target - 1) <= FITTED_WITHIN:
            return {option: fitted}
        raise InputError(
            f"contender {contender.name}: no width of its experts gives it the {target:,} "
            f"{self.told} of {reference.name}: leave it out"
        )

    def value(self, contender: Contender, parameters: Counts, means: RunMeasures) -> float | None:
        """What is equal, as measured: from the counts at the measured experts per token, and the
        means over runs. None: the contender has no such number."""
        if self.reading is None:
            return None if contender.system == DENSE else means.get("experts_per_token")
        value: float | None = parameters.get(self.reading)
        if value is not None and self.fits == "iterations":
            value *= means["consumed_tokens"]
        return value

    def _known(self, count: Count, contender: Contender) -> int:
        if (value := count(contender)[str(self.reading)]) is None:
            raise InputError(
                f"contender {contender.name}: training decides its experts per token, so it cannot "
                "be made equal before training: control their mean, or leave it out"
            )
        return int(value)


TERMS = {
    "experts": Terms("experts per token"),
    "active": Terms("active parameters", "active", "width"),
    "active_compute": Terms("active parameters, all that computes", "active_compute", "width"),
    "flops": Terms("FLOPs of training", "flops_per_token", "iterations"),
}


@dataclass(frozen=True)
class StudyDesign:
    """The design of a study.

    selections: the contenders, as --selections names them; () : --selections must.
    seeds: runs per contender; seeds_of: those of contenders that have another number, by name.
    equal: the terms of the comparison, a key of TERMS.
    judged_by: the held-out loss that is compared, one of LOSSES, mean over domains.
    margin: two losses that differ by less, in nats per token, are equivalent. None: no tests.
    lr_grid: multiples of a contender's learning rate that its pilot runs try. (): none.
    pilot_seed: of the pilot runs; no other run has it.
    balance_grid: by contender, an option and the further values of it that pilot runs try, each at
    the best rate.
    """

    selections: tuple[str, ...] = field(default=(), compare=False)  # these three may grow
    seeds: int = field(default=3, compare=False)
    seeds_of: Mapping[str, int] = field(default_factory=dict, compare=False)
    equal: str = "experts"
    judged_by: str = LOSSES[0]
    margin: float | None = None
    lr_grid: tuple[float, ...] = ()
    pilot_seed: int | None = None
    balance_grid: Mapping[str, tuple[str, tuple[float, ...]]] = field(default_factory=dict)

    @property
    def terms(self) -> Terms:
        return TERMS[self.equal]

    @classmethod
    def from_raw(cls, raw: Any) -> StudyDesign:
        """`raw`: the content of the section; None: there is none. Raises InputError."""
        if raw is None:
            return cls()
        if not isinstance(raw, Mapping):
            raise InputError(f"{SECTION}: {shown(raw)} holds no lines of the form `key: value`")
        values: dict[str, Any] = {}
        for key, value in raw.items():
            name = str(key).replace("-", "_")
            if name not in _FORMS:
                known = ", ".join(each.replace("_", "-") for each in _FORMS)
                raise _wrong(f"{as_typed(str(key))} is not known; choose from {known}")
            parse, form = _FORMS[name]
            try:
                values[name] = parse(value)
            except (TypeError, ValueError, ArithmeticError, AttributeError):
                raise _wrong(f"{key} is {shown(value)}: give {form}") from None
        if "seeds" in values:
            values["seeds_of"] = values["seeds"]
            values["seeds"] = values["seeds_of"].pop(_DEFAULT, cls.seeds)
        return cls(**values)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> StudyDesign:
        return cls(**{name: _as_tuples(value) for name, value in content.items()})

    def seeds_for(self, contender: str) -> int:
        """The number of runs of the contender."""
        return self.seeds_of.get(contender, self.seeds)

    def check_seeds(self, seeds: Sequence[int]) -> None:
        """Raises InputError if a run that is compared would repeat a pilot run."""
        if self.pilot_seed in seeds:
            raise _wrong(
                f"pilot-seed is {self.pilot_seed}, also the seed of a run that is compared "
                f"({seeds[0]} to {seeds[-1]}): choose another"
            )

    def __post_init__(self) -> None:
        """Raises InputError for values that do not fit together."""
        if bool(self.lr_grid) != (self.pilot_seed is not None):
            raise _wrong("lr-grid and pilot-seed need each other: give both, or neither")
        names = [word.partition("=")[0] for word in self.selections]
        for key, its in (("seeds", self.seeds_of), ("balance-grid", self.balance_grid)):
            for name in its:
                if name not in names:
                    raise _wrong(
                        f"{key} has {as_typed(name)}, which selections does not name: choose from "
                        f"{', '.join([_DEFAULT, *names] if its is self.seeds_of else names)}"
                    )
        if self.balance_grid and not self.lr_grid:
            raise _wrong("balance-grid follows lr-grid: give both")
        most = max(names, key=self.seeds_for, default=None)
        if most is not None and self.seeds_for(most) > self.seeds_for(names[0]):
            raise _wrong(
                f"seeds gives {most} {self.seeds_for(most)} and the reference "
                f"{names[0]} {self.seeds_for(names[0])}: a difference needs a run of both with "
                "the same seed, so give the reference as many"
            )


def _wrong(text: str) -> InputError:
    return InputError(f"{SECTION}: {text}")


def _as_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_tuples(each) for name, each in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _number(value: Any) -> float:
    number = float(Fraction(value) if isinstance(value, str) else value)
    if isinstance(value, bool) or not (math.isfinite(number) and number > 0):
        raise ValueError
    return number


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError
    return value


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError
    return tuple(value)


def _grid(value: Any) -> tuple[float, ...]:
    factors = tuple(map(_number, value))
    if list(factors) != sorted(set(factors)) or len(factors) < 2 or 1.0 not in factors:
        raise ValueError
    if not 1e-3 <= factors[0] <= factors[-1] <= 1e3:
        raise ValueError
    return factors


def _balance_grid(value: Any) -> dict[str, tuple[str, tuple[float, ...]]]:
    grid = {}
    for key, values in value.items():
        name, option = key.split(":")
        if name in grid or not values:
            raise ValueError
        grid[name] = (option.replace("-", "_"), tuple(map(_number, values)))
    return grid


def _one_of(choices: Sequence[str]) -> tuple[Callable[[Any], str], str]:
    def parse(value: Any) -> str:
        return choices[choices.index(str(value).replace("-", "_"))]

    return parse, f"one of {', '.join(choices)}"


#: The keys: what makes a value of what is written, and what may be written, in words.
_FORMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "selections": (_names, "a list of names, such as [topk, aoe]"),
    "seeds": (
        lambda value: (
            {str(name): _count(number) for name, number in value.items()}
            if isinstance(value, Mapping)
            else {_DEFAULT: _count(value)}
        ),
        "a whole number of at least 1, or one by name",
    ),
    "equal": _one_of(tuple(TERMS)),
    "judged_by": _one_of(LOSSES),
    "margin": (_number, "a number above 0"),
    "lr_grid": (_grid, "two or more rising factors from 1/1000 to 1000, with 1: [1/3, 1, 3]"),
    "pilot_seed": (_count, "a whole number of at least 1"),
    "balance_grid": (
        _balance_grid,
        "one option of each contender with values above 0: topk:moe-aux-loss-coeff: [0.001, 0.1]",
    ),
}
