"""What the records of a scaling study's run show: its speed, and where a step spends its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_parallel.analysis.run_history import RunHistory
from moe_parallel.errors import InputError
from moe_parallel.telemetry.metrics import MetricsLine

EXCHANGE_COLUMNS = ("dispatch", "pipeline", "reduce")


@dataclass(frozen=True)
class Measures:
    """Means over the logged steps after the warm-up, in seconds a step and tokens a second."""

    tokens_per_second: float
    step_seconds: float
    phases: dict[str, float]  # compute, data, EXCHANGE_COLUMNS, rest: means over the ranks
    # Between two steps, where there are several: saves; then evaluations, log lines and, of runs
    # whose records have no save_seconds, saves.
    save_seconds: float | None
    between_seconds: float | None

    @staticmethod
    def of(history: RunHistory, tokens_per_step: int, warm_up: int) -> Measures:
        """The measures of a run. Raises InputError if no step is left after the warm-up."""

        def counts(record: MetricsLine) -> bool:
            return record["iteration"] > warm_up and "ranks" in record

        processes = [list(filter(counts, of_process)) for of_process in history.processes]
        kept = [record for of_process in processes for record in of_process]
        if not kept:
            raise InputError(
                f"--warm-up {warm_up} leaves no logged step: lower it, or train for longer"
            )
        step = float(np.mean([_seconds(each, tokens_per_step) for each in kept]))

        def mean(name: str) -> float:
            return float(np.mean([each["ranks"][f"{name}_seconds"] for each in kept]))

        phases = {"compute": mean("own")}
        if all("data_seconds" in each["ranks"] for each in kept):  # those of older runs have none
            phases["data"] = mean("data")
            phases["compute"] -= phases["data"]
        phases |= {name: mean(name) for name in EXCHANGE_COLUMNS}
        # `own` is a median of the steps of a log line: the rest may be a little below zero.
        phases["rest"] = step - sum(phases.values())
        return Measures(
            tokens_per_second=tokens_per_step / step,
            step_seconds=step,
            phases=phases,
            **_between(processes, tokens_per_step),
        )


def _seconds(record: MetricsLine, tokens_per_step: int) -> float:
    """The mean step of a record."""
    return float(tokens_per_step / record["tokens_per_second"])


def _between(
    processes: Sequence[Sequence[MetricsLine]], tokens_per_step: int
) -> dict[str, float | None]:
    """The mean time of saves, and of all else, between two steps of one process, a step."""
    number, elapsed = 0, 0.0
    later: list[MetricsLine] = []
    for records in filter(None, processes):  # the steps of the first record precede its time
        number += records[-1]["iteration"] - records[0]["iteration"]
        elapsed += records[-1]["elapsed_seconds"] - records[0]["elapsed_seconds"]
        later += records[1:]
    if not number:
        return {"save_seconds": None, "between_seconds": None}
    between = elapsed / number - float(np.mean([_seconds(each, tokens_per_step) for each in later]))
    if not all("save_seconds" in record for records in processes for record in records):
        return {"save_seconds": None, "between_seconds": between}
    saves = sum(record["save_seconds"] for record in later) / number
    return {"save_seconds": saves, "between_seconds": between - saves}
