"""What the records of a scaling study's run show: its speed, and where a step spends its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_parallel.errors import InputError

EXCHANGES = ("dispatch", "pipeline", "reduce")


@dataclass(frozen=True)
class Measures:
    """Means over the logged steps after the warm-up, in seconds a step and tokens a second."""

    tokens_per_second: float
    step_seconds: float
    phases: dict[str, float]  # compute, data, EXCHANGES, rest: means over the ranks
    # Between two steps, where there are several: saves; then evaluations, log lines and, of runs
    # whose records have no save_seconds, saves.
    save_seconds: float | None
    between_seconds: float | None

    @staticmethod
    def of(records: Sequence[dict[str, Any]], tokens_per_step: int, warm_up: int) -> Measures:
        """The measures of a run's records. Raises InputError if none is left after the warm-up."""
        kept = [each for each in records if each["iteration"] > warm_up and "ranks" in each]
        if not kept:
            raise InputError(
                f"--warm-up {warm_up} leaves no logged step: lower it, or train for longer"
            )
        steps = [tokens_per_step / each["tokens_per_second"] for each in kept]
        step = float(np.mean(steps))

        def mean(name: str) -> float:
            return float(np.mean([each["ranks"][f"{name}_seconds"] for each in kept]))

        phases = {"compute": mean("own")}
        if all("data_seconds" in each["ranks"] for each in kept):  # those of older runs have none
            phases["data"] = mean("data")
            phases["compute"] -= phases["data"]
        phases |= {name: mean(name) for name in EXCHANGES}
        # `own` is a median of the steps of a log line: the rest may be a little below zero.
        phases["rest"] = step - sum(phases.values())
        return Measures(tokens_per_step / step, step, phases, *_between(kept, steps))


def _between(
    records: Sequence[dict[str, Any]], steps: Sequence[float]
) -> tuple[float | None, float | None]:
    """The mean time of saves and that of all else between two steps, in seconds a step.

    `steps`: the mean step of each record. The steps of the first record precede its time.
    """
    first, last = records[0], records[-1]
    number = last["iteration"] - first["iteration"]
    if number == 0:
        return None, None
    elapsed = last["elapsed_seconds"] - first["elapsed_seconds"]
    between = elapsed / number - float(np.mean(steps[1:]))
    if not all("save_seconds" in each for each in records):
        return None, between
    save = sum(each["save_seconds"] for each in records[1:]) / number
    return save, between - save
