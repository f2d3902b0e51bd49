"""How the contenders of a study start, and how fast their states move, for a length of training.

A comparison says little if the layers of one contender start with outputs several times as large as
those of another, or if a state that balances or controls it needs a large part of the run.
"""

from __future__ import annotations

from moe_parallel.analysis.study.markdown import NONE, markdown_table
from moe_parallel.analysis.study.results import Result, StudyResults

OUTPUT_RMS = "output_rms"  # the measure
MOST_TIMES = 3.0  # by which outputs may differ from those of the reference


def starts_section(study: StudyResults) -> list[str]:
    """The section of the report; [] if no run has recorded a start and no state moves."""
    rows = [
        [result.name, _rms(result), _times_told(study, result), _time_constants(result)]
        for result in study.results
        if not result.is_dense
    ]
    if all(cell == NONE for row in rows for cell in row[1:]):
        return []
    heads = [
        "",
        "RMS of the MoE layers' outputs at the start",
        f"times that of {study.reference.name}",
        "time constants, in runs",
    ]
    return ["## Starts and states\n", markdown_table(heads, rows)]


def unequal_starts(study: StudyResults) -> list[str]:
    """A note for each contender that starts far from the reference."""
    found = {result.name: _times(study, result) for result in study.results}
    return [
        f"**{name}** starts with outputs of its MoE layers {times:.2g} times as large as those of "
        f"{study.reference.name}: a difference of the losses may come from the initial weights."
        for name, times in found.items()
        if times is not None and not 1 / MOST_TIMES <= times <= MOST_TIMES
    ]


def _rms(result: Result) -> str:
    spread = result.spreads.get(OUTPUT_RMS)
    return NONE if spread is None else f"{spread.mean:.3g}"


def _times(study: StudyResults, result: Result) -> float | None:
    own, reference = (each.spreads.get(OUTPUT_RMS) for each in (result, study.reference))
    if own is None or reference is None or not reference.mean:
        return None
    return own.mean / reference.mean


def _times_told(study: StudyResults, result: Result) -> str:
    times = _times(study, result)
    return NONE if times is None else f"{times:.2f}"


def _time_constants(result: Result) -> str:
    config = result.contender.config
    steps = config.training.train_iters
    told = [f"{each.state} {each.steps / steps:.2g}" for each in config.time_constants]
    return "; ".join(told) or NONE
