"""The report of a scaling study: a table, and a figure of speed, efficiency, the split of a step,
and the plan's error."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_parallel.analysis.scaling.rows import NODES_AXIS, Row
from moe_parallel.analysis.study.figures import contender_style, domain_color, new_figure

IDEAL = "#bbbbbb"
#: Evaluations and log lines; in older runs also saves.
BETWEEN = "between steps"


def write_scaling_report(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write scaling.csv and scaling.png; the files."""
    table, figure = folder / "scaling.csv", folder / "scaling.png"
    with table.open("w", newline="") as file:
        columns = list(dict.fromkeys(name for row in rows for name in row.values))
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.values for row in rows)
    scaling_figure(rows).savefig(figure, dpi=110)
    return [table, figure]


def scaling_figure(rows: Sequence[Row]) -> Figure:
    """The figure of rows of one axis. With no plan, the panel of errors says why."""
    axis = rows[0].axis
    figure = new_figure(
        13, 8.6, f"Scaling over {axis.replace('_', ' ')}",
        "means after the warm-up; gray: ideal; dotted: planned; split: means of the ranks, with "
        "the planned time of a step as a line",
    )  # fmt: skip
    (speed, efficiency), (split, error) = figure.subplots(2, 2)
    positions = _positions(rows)
    lines = list(dict.fromkeys(row.line for row in rows))
    for place, line in enumerate(lines):
        its_own = [row for row in rows if row.line == line]
        at = [positions[row.place] for row in its_own]
        _draw_line((speed, efficiency, error), its_own, at, place)
    _draw_split(split, rows)
    titles = {
        speed: "tokens a second",
        efficiency: "efficiency" if axis == NODES_AXIS else "speed, over that of the first",
        error: "error of the plan: planned / measured tokens a second - 1",
    }
    for axes, title in titles.items():
        axes.set_xticks(list(positions.values()), labels=[str(value) for value in positions])
        axes.set_xlabel(axis.replace("_", " "))
        axes.set_title(title, fontsize=11, loc="left")
    speed.set_yscale("log")
    efficiency.set_ylim(0, 1.05 * efficiency.get_ylim()[1])
    error.axhline(0, color=IDEAL, lw=1, zorder=0)
    error.yaxis.set_major_formatter(lambda value, _: f"{value:+.0%}")
    if reasons := list(dict.fromkeys(row.no_plan for row in rows if row.no_plan is not None)):
        text = "\n".join(["no plan:" if len(reasons) == 1 else "no plan for some cells:", *reasons])
        error.text(0.02, 0.98, text, transform=error.transAxes, va="top", fontsize=8, wrap=True)
    if len(lines) > 1:
        speed.legend(fontsize=8)
    return figure


def _positions(rows: Sequence[Row]) -> dict[Any, float]:
    """Where each value is on the axis: numbers of nodes by logarithm, others side by side."""
    values = list(dict.fromkeys(row.place for row in rows))
    if rows[0].axis == NODES_AXIS:
        return {value: math.log2(value) for value in values}
    return {value: float(place) for place, value in enumerate(values)}


def _draw_line(
    panels: tuple[Axes, Axes, Axes], rows: Sequence[Row], at: Sequence[float], place: int
) -> None:
    """The cells that differ only on the axis, at their positions there."""
    speed, efficiency, error = panels
    style, first = contender_style(place), rows[0]
    measured = [row.measures.tokens_per_second for row in rows]
    speed.plot(at, measured, label=first.line or "measured", **style)
    efficiency.plot(at, [row.efficiency for row in rows], **style)
    if first.axis == NODES_AXIS:
        ideal = [measured[0] / first.cell.nodes * row.cell.nodes for row in rows]
        speed.plot(at, ideal, color=IDEAL, lw=1, zorder=0)
        efficiency.axhline(1, color=IDEAL, lw=1, zorder=0)
    planned = [
        (position, row.planned, row.planned / row.cell.nodes, row.plan_error)
        for position, row in zip(at, rows, strict=True)
        if row.planned is not None
    ]
    if not planned:
        return
    where, tokens, per_node, errors = (list(column) for column in zip(*planned, strict=True))
    dotted = {"color": style["color"], "ls": ":"}
    speed.plot(where, tokens, **dotted)
    efficiency.plot(where, [each / per_node[0] for each in per_node], **dotted)
    error.plot(where, errors, **style)


def _split(row: Row) -> dict[str, float]:
    """The seconds of a step, and of what lies between two steps, by part."""
    measures = row.measures
    saves = {} if measures.save_seconds is None else {"save": measures.save_seconds}
    return {**measures.phases, **saves, BETWEEN: measures.between_seconds or 0.0}


def _draw_split(axes: Axes, rows: Sequence[Row]) -> None:
    """A bar for each cell: the phases of a step and, above it, what lies between two steps."""
    several = len({row.line for row in rows}) > 1
    names = [f"{row.place}" + (f"\n{row.line}" if several else "") for row in rows]
    stacks = [_split(row) for row in rows]
    bottom = [0.0] * len(rows)
    for place, phase in enumerate(dict.fromkeys(name for stack in stacks for name in stack)):
        heights = [max(0.0, stack.get(phase, 0.0)) for stack in stacks]
        style: dict[str, Any] = {"color": domain_color(place)}
        if phase == BETWEEN:
            style = {"facecolor": "white", "edgecolor": IDEAL, "hatch": "////"}
        axes.bar(range(len(rows)), heights, bottom=bottom, label=phase, **style)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for place, row in enumerate(rows):
        if row.planned is not None and row.plan_error is not None:
            tokens = row.measures.tokens_per_second * row.measures.step_seconds
            axes.hlines(tokens / row.planned, place - 0.45, place + 0.45, color="black", lw=1.5)
            text = f"{row.plan_error:+.0%}"
            axes.annotate(text, (place, bottom[place]), ha="center", va="bottom", fontsize=8)
    axes.margins(y=0.1)  # room for the error above the highest bar
    axes.set_xticks(range(len(rows)), labels=names, fontsize=8)
    axes.set_xlabel(rows[0].axis.replace("_", " "))
    axes.set_title("seconds of a step; above the bar: error of the plan", fontsize=11, loc="left")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
