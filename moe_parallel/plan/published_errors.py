"""How far off the plans of published runs are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moe_parallel.plan.calibration import NodeCalibration, calibrations
from moe_parallel.plan.cluster import Efficiency
from moe_parallel.plan.published import PublishedRun


@dataclass(frozen=True)
class PublishedErrors:
    """The plans of published runs beside their speeds."""

    runs: list[PublishedRun]
    efficiency: Efficiency  # of the plans
    calibrations: dict[str, NodeCalibration]  # by name of the node

    @classmethod
    def of(cls, runs: list[PublishedRun], efficiency: Efficiency) -> PublishedErrors:
        """Raises InputError if a run that calibrates cannot be matched."""
        return cls(runs, efficiency, calibrations(runs, efficiency))

    def json(self) -> list[dict[str, Any]]:
        """One object for each run."""
        return [self._row(run) for run in self.runs]

    def _row(self, run: PublishedRun) -> dict[str, Any]:
        time = run.planned(self.efficiency)
        return {
            "name": run.name,
            "published_tokens_per_second_and_gpu": run.tokens_per_gpu,
            "planned_tokens_per_second_and_gpu": time.tokens_per_gpu,
            "error": time.tokens_per_gpu / run.tokens_per_gpu - 1,
            "error_with_calibration": self.calibrations[run.cluster.node.name].error(run),
            "calibrates": run.calibrates,
            "seconds_by_part": time.parts,
            "source": run.source,
            "differs": run.differs,
        }

    def table(self) -> str:
        """A row for each run, then a line for each constant that runs have calibrated."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{'tokens/s/GPU':42}{'published':>10}{'planned':>9}{'error':>9}{'calibrated':>12}"
        for row in self.json():
            fitted = "fitted" if row["calibrates"] else f"{row['error_with_calibration']:+.1%}"
            yield (
                f"{row['name']:42}{row['published_tokens_per_second_and_gpu']:10,.0f}"
                f"{row['planned_tokens_per_second_and_gpu']:9,.0f}{row['error']:+9.1%}{fitted:>12}"
            )
        yield ""
        for node, calibration in self.calibrations.items():
            yield from _constants(node, calibration)


def _constants(node: str, calibration: NodeCalibration) -> Iterator[str]:
    values = {
        "fp8": f"{calibration.efficiency.fp8:.3f} of the peak",
        "kernel_time": f"{calibration.times.kernel_time * 1e6:.1f} µs",
        "call_time": f"{calibration.times.call_time * 1e6:.1f} µs",
    }
    for name, run in calibration.runs.items():
        yield f"{node} calibrated: {name} {values[name]}, by {run}"
