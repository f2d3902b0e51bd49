"""The design of a study: what it holds equal, tunes and tests, stated before its first run.

It is the section `study` of the study's file:

    study:
      selections: [topk, aoe, dense]
      seeds: {default: 3, topk: 5, aoe: 5}
      equal: experts
      lr-grid: [1/3, 1, 3]
      pilot-seed: 99
      margin: 0.01

`equal` names the terms: what a study makes equal before training, and measures afterward.

    experts          experts per token, total parameters, tokens (the default)
    active           active parameters of the chosen experts; the experts' width is fitted
    active_compute   active parameters of all that computes for a token; likewise
    flops            FLOPs of the whole training; the number of iterations is fitted
    time             seconds of training; likewise, by the speed of the pilot runs

A contender whose measured value differs by more than the tolerance is reported, not compared.
"""

from __future__ import annotations

import dataclasses
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
_FACTOR_MOST = 1000
_DEFAULT = "default"  # of the numbers of seeds: that of the contenders without one of their own
_ITERATIONS = ("lr_warmup_iters", "lr_decay_iters", "lr_wsd_decay_iters")

Counts = Mapping[str, Any]  # what tools/count_parameters.py prints
Count = Callable[[Contender], Counts]


@dataclass(frozen=True)
class Terms:
    """One kind of equality. `told`: what is equal, in words; `tolerance`: relative."""

    told: str
    tolerance: float = 0.02
    equal_totals: bool = True
    equal_tokens: bool = True
    timed: bool = False  # the pilot runs must be finished before the others are planned

    def fit(self, contender: Contender, reference: Contender, count: Count) -> Options:
        """The options that make the contender equal to the reference. Raises InputError."""
        return {}

    def value(self, contender: Contender, parameters: Counts, means: RunMeasures) -> float | None:
        """What is equal, as measured: from the counts at the measured experts per token, and the
        means over runs. None: the contender has no such number."""
        return None if contender.system == DENSE else means.get("experts_per_token")


@dataclass(frozen=True)
class EqualActive(Terms):
    reading: str = "active"

    def fit(self, contender: Contender, reference: Contender, count: Count) -> Options:
        target, config = _known(count(reference), self.reading, reference), contender.config
        option, width = "ffn_hidden_size", config.model.ffn_hidden_size
        if contender.system != DENSE:
            option, width = "moe_ffn_hidden_size", config.moe.moe_ffn_hidden_size or width

        def counted(options: Options) -> int:
            return _known(count(contender.with_options(options)), self.reading, contender)

        now = counted({})
        if abs(now / target - 1) <= FITTED_WITHIN:
            return {}
        # The count is linear in the width (for AoE nearly so): follow the line to the target.
        slope = (counted({option: 2 * width}) - now) / width
        fitted = round(width + (target - now) / slope) if slope > 0 else 0
        if fitted >= 1 and abs(counted({option: fitted}) / target - 1) <= FITTED_WITHIN:
            return {option: fitted}
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
    values = {"train_iters": config.training.train_iters}
    values |= {name: getattr(config.optimizer, name) for name in _ITERATIONS}
    return {name: round(value * ratio) for name, value in values.items() if value is not None}


def _known(counts: Counts, name: str, contender: Contender) -> int:
    if counts[name] is None:
        raise InputError(
            f"contender {contender.name}: training decides its experts per token, so it cannot be "
            "made equal before training: control their mean, or leave it out"
        )
    return int(counts[name])


TERMS: dict[str, Terms] = {
    "experts": Terms("experts per token"),
    "active": EqualActive("active parameters", equal_totals=False),
    "active_compute": EqualActive(
        "active parameters, all that computes", equal_totals=False, reading="active_compute"
    ),
    "flops": EqualFlops("FLOPs of training", equal_tokens=False),
    "time": EqualTime("seconds of training", 0.05, equal_tokens=False, timed=True),
}


@dataclass(frozen=True)
class StudyDesign:
    """The design of a study.

    selections: the contenders, as --selections names them; () : --selections must.
    seeds: runs per contender; seeds_of: those of contenders that have another number, by name.
    equal: the terms of the comparison, a key of TERMS.
    judged_by: the held-out loss that is compared, one of LOSSES, mean over domains.
    margin: two losses that differ by less, in nats per token, are equivalent. None: no tests.
    pairs: contenders that are tested against each other, besides all against the reference.
    lr_grid: multiples of a contender's learning rate that its pilot runs try. (): none.
    pilot_seed: of the pilot runs; no other run has it.
    """

    selections: tuple[str, ...] = field(default=(), compare=False)  # these three may grow
    seeds: int = field(default=3, compare=False)
    seeds_of: Mapping[str, int] = field(default_factory=dict, compare=False)
    equal: str = "experts"
    judged_by: str = LOSSES[0]
    margin: float | None = None
    pairs: tuple[tuple[str, str], ...] = ()
    lr_grid: tuple[float, ...] = ()
    pilot_seed: int | None = None

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
            if name not in _PARSERS:
                known = ", ".join(each.replace("_", "-") for each in _PARSERS)
                raise _wrong(f"{as_typed(str(key))} is not known; choose from {known}")
            values[name] = _PARSERS[name](str(key), value)
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

    def difference_from(self, earlier: StudyDesign) -> tuple[str, Any, Any] | None:
        """The first value that differs and may not: (name, its, ours)."""
        for each in dataclasses.fields(self):
            its, ours = getattr(earlier, each.name), getattr(self, each.name)
            if each.compare and its != ours:
                return each.name.replace("_", "-"), its, ours
        return None

    def __post_init__(self) -> None:
        """Raises InputError for values that do not fit together."""
        if bool(self.lr_grid) != (self.pilot_seed is not None):
            raise _wrong("lr-grid and pilot-seed need each other: give both, or neither")
        if self.terms.timed and not self.lr_grid:
            raise _wrong(f"equal: {self.equal} needs lr-grid, whose pilot runs are timed")
        names = [word.partition("=")[0] for word in self.selections]
        for key, used in (("seeds", self.seeds_of), ("pairs", sum(self.pairs, ()))):
            for name in used:
                if name not in names:
                    known = [_DEFAULT, *names] if key == "seeds" else names
                    raise _wrong(
                        f"{key} has {as_typed(name)}, which selections does not name: choose from "
                        f"{', '.join(known)}"
                    )
        most = max(names, key=self.seeds_for, default=None)
        if most is not None and self.seeds_for(most) > self.seeds_for(names[0]):
            raise _wrong(
                f"seeds gives {most} {self.seeds_for(most)} and the reference "
                f"{names[0]} {self.seeds_for(names[0])}: a difference needs a run of both with "
                "the same seed, so give the reference as many"
            )
        if self.pairs and self.margin is None:
            raise _wrong("pairs needs margin, without which nothing is tested")
        if len(set(map(frozenset, self.pairs))) < len(self.pairs):
            raise _wrong("pairs names two contenders twice: name each pair once")
        for one, other in self.pairs:
            if one == other or names[0] in (one, other):
                raise _wrong(
                    f"pairs has [{one}, {other}]: give two contenders, neither of them the "
                    f"reference {names[0]}, with which each is compared anyway"
                )


def _wrong(text: str) -> InputError:
    return InputError(f"{SECTION}: {text}")


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _number(name: str, value: Any) -> float:
    try:
        number = float(Fraction(value) if isinstance(value, str) else value)
    except (TypeError, ValueError, ZeroDivisionError):
        raise _wrong(f"{name} has {shown(value)}, which is not a number") from None
    if isinstance(value, bool) or not (math.isfinite(number) and number > 0):
        raise _wrong(f"{name} has {shown(value)}: it must be a number above 0")
    return number


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(f"{name} is {shown(value)}: it must be a whole number of at least 1")
    return value


def _numbers(name: str, value: Any) -> dict[str, int]:
    """A number for all contenders, or one for each name."""
    if not isinstance(value, Mapping):
        return {_DEFAULT: _count(name, value)}
    return {str(key): _count(f"{name}: {key}", number) for key, number in value.items()}


def _words(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _wrong(f"{name} is {shown(value)}: give a list of names, such as [topk, aoe]")
    return tuple(value)


def _pairs(name: str, value: Any) -> tuple[tuple[str, ...], ...]:
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(each, str) for each in pair)
        for pair in value
    ):
        raise _wrong(f"{name} is {shown(value)}: give pairs of names, such as [[a, b]]")
    return tuple(map(tuple, value))


def _grid(name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) < 2:
        raise _wrong(f"{name} is {shown(value)}: give at least two factors, as [1/3, 1, 3]")
    factors = tuple(_number(name, each) for each in value)
    if list(factors) != sorted(set(factors)) or 1.0 not in factors:
        raise _wrong(f"{name} is {shown(value)}: give rising factors, 1 among them")
    if not 1 / _FACTOR_MOST <= factors[0] <= factors[-1] <= _FACTOR_MOST:
        raise _wrong(f"{name} is {shown(value)}: choose from 1/{_FACTOR_MOST} to {_FACTOR_MOST}")
    return factors


def _one_of(choices: Sequence[str]) -> Callable[[str, Any], str]:
    def parse(name: str, value: Any) -> str:
        text = str(value).replace("-", "_")
        if text not in choices:
            raise _wrong(f"{name} is {shown(value)}: choose from {', '.join(choices)}")
        return text

    return parse


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "selections": _words,
    "seeds": _numbers,
    "equal": _one_of(tuple(TERMS)),
    "judged_by": _one_of(LOSSES),
    "margin": _number,
    "pairs": _pairs,
    "lr_grid": _grid,
    "pilot_seed": _count,
}
