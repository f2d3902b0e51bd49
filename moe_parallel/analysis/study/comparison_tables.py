"""The sections of a study's page that its design adds: terms, tests, and the learning rates."""

from __future__ import annotations

import math

from moe_parallel.analysis.study.comparison import Comparison, Comparisons, term_values
from moe_parallel.analysis.study.conclusions import conclusions
from moe_parallel.analysis.study.markdown import NONE, Cells, fixed, markdown_table, signed
from moe_parallel.analysis.study.results import StudyResults
from moe_parallel.analysis.study.sweep import Sweep


def comparison_sections(study: StudyResults) -> list[str]:
    """The terms, the tests, and the conclusions. Without a margin there are none."""
    if (comparisons := Comparisons.of(study)) is None:
        return []
    return [
        "## What the numbers show\n",
        "\n".join(f"- {sentence}" for sentence in conclusions(study, comparisons)) + "\n",
        f"## Equal terms: {study.design.terms.told}\n",
        _terms(study, comparisons),
        f"## Tests against {study.reference.name}\n",
        _tests(comparisons),
    ]


def sweep_section(study: StudyResults) -> list[str]:
    """Every loss of the learning-rate grids. Nothing without one."""
    if not study.sweeps:
        return []
    factors = [f"lr × {factor:.3g}" for factor in study.design.lr_grid]
    heads = ["", *factors, "further run", "chosen lr"]
    return [
        "## Learning rates\n",
        markdown_table(heads, [[name, *_sweep(sweep)] for name, sweep in study.sweeps.items()]),
        "Held-out loss of the pilot runs, one for each rate, with a seed that no compared run has. "
        "The column × 1 compares the contenders at the rate of the file. Every contender has the "
        "same number of pilot runs. If the best rate is at the edge of the grid, the further run "
        "is beyond that edge, otherwise between the best rate and the better of its neighbors. ‡: "
        "the chosen rate is the lowest or the highest that was tried, so another may be better.\n",
    ]


def _terms(study: StudyResults, comparisons: Comparisons) -> str:
    values = term_values(study)
    first = values[study.reference.name]
    rows = []
    for name, value in values.items():
        shown, ratio = NONE, NONE
        if value is not None:
            shown = f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}"
            ratio = NONE if not first else f"{value / first:.1%}"
        compared = "no" if name in comparisons.only_reported else "yes"
        rows.append([name, shown, ratio, compared])
    told, tolerance = study.design.terms.told, study.design.terms.tolerance
    return markdown_table(["", told, f"of {study.reference.name}'s", "compared"], rows) + (
        f"\nMeasured after training. A contender that differs by more than {tolerance:.0%} is "
        "reported and not compared.\n"
    )


def _tests(comparisons: Comparisons) -> str:
    heads = ["", "mean", "95% interval", "90% interval", "standard deviation", "seeds"]
    heads += ["p of no difference, corrected", f"p of one ≥ {comparisons.margin:g}", "verdict"]
    rows = [_test(each.name, each) for each in comparisons.compared.values()]
    rows += [_test(f"{each.name} against {each.other}", each) for each in comparisons.of_pairs]
    return markdown_table(heads, rows)


def _test(name: str, comparison: Comparison) -> Cells:
    test = comparison.test
    return [
        name,
        signed(test.mean),
        f"{signed(test.low)} to {signed(test.high)}",
        f"{signed(test.low_90)} to {signed(test.high_90)}",
        fixed(test.deviation, 4),
        str(test.runs),
        f"{comparison.p:.3g}",
        f"{test.p_equivalent:.3g}",
        comparison.verdict,
    ]


def _sweep(sweep: Sweep) -> Cells:
    further = NONE
    if sweep.further is not None:
        further = f"{_loss(sweep, sweep.further)} at {sweep.further:g}"
    chosen = NONE
    if sweep.best is not None:
        chosen = f"{sweep.best:g}" + (" ‡" if sweep.best_is_at_an_edge else "")
    return [*(_loss(sweep, rate) for rate in sweep.grid), further, chosen]


def _loss(sweep: Sweep, rate: float) -> str:
    if rate not in sweep.losses:
        return NONE
    loss = sweep.losses[rate]
    if not math.isfinite(loss):
        return "diverged"
    return f"**{fixed(loss, 4)}**" if rate == sweep.best else fixed(loss, 4)
