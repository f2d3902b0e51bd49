"""The table and the figure of a scaling study."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_parallel.analysis.scaling.folder import CellFolder
from moe_parallel.analysis.scaling.grid import ScalingCell
from moe_parallel.analysis.scaling.measures import Measures
from moe_parallel.analysis.study.figure_style import contender_style, domain_color, new_figure
from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import Cluster, Node
from moe_parallel.plan.search import Refused, plan_layout


@dataclass(frozen=True)
class Row:
    """A finished cell: its measures, its efficiency, and the plan's tokens a second."""

    cell: ScalingCell
    measures: Measures
    efficiency: float  # tokens a second and node, over those of the smallest cell of its line
    planned: float | None

    @property
    def line(self) -> str:
        """The cells that differ only in their nodes have the same."""
        return ", ".join(f"{name} {value}" for name, value in self.cell.varied.items())

    @property
    def values(self) -> dict[str, object]:
        """The columns of the CSV."""
        planned, measured = self.planned, self.measures.tokens_per_second
        between = self.measures.between_seconds
        return {
            "nodes": self.cell.nodes,
            "ranks": self.cell.ranks,
            **self.cell.varied,
            "global_batch_size": self.cell.config.training.global_batch_size,
            "tokens_per_second": round(measured, 2),
            "efficiency": round(self.efficiency, 4),
            "step_seconds": round(self.measures.step_seconds, 6),
            **{f"{name}_seconds": round(s, 6) for name, s in self.measures.phases.items()},
            "between_seconds": None if between is None else round(between, 6),
            "planned_tokens_per_second": None if planned is None else round(planned, 2),
            "plan_error": None if self.plan_error is None else round(self.plan_error, 4),
        }

    @property
    def plan_error(self) -> float | None:
        """Planned over measured tokens a second, minus 1."""
        return None if self.planned is None else self.planned / self.measures.tokens_per_second - 1


def rows_of(folders: Sequence[CellFolder], warm_up: int, node: Node | None) -> list[Row]:
    """The rows of the finished cells. Raises InputError if there is none."""
    rows: list[Row] = []
    smallest: dict[str, tuple[int, float]] = {}
    for each in folders:
        if not each.is_finished:
            continue
        cell, training = each.cell, each.cell.config.training
        tokens = training.global_batch_size * training.seq_length
        measures = Measures.of(each.records, tokens, warm_up)
        nodes, speed = smallest.setdefault(
            str(dict(cell.varied)), (cell.nodes, measures.tokens_per_second)
        )
        efficiency = measures.tokens_per_second / cell.nodes / (speed / nodes)
        rows.append(Row(cell, measures, efficiency, _planned(cell, node)))
    if not rows:
        raise InputError("the study has no finished cell yet: nothing to report")
    return rows


def _planned(cell: ScalingCell, node: Node | None) -> float | None:
    """The plan's tokens a second; None without a node, or if the plan refuses the cell."""
    vocabulary = cell.config.data.vocab_size
    if node is None or vocabulary is None or node.gpus * cell.nodes != cell.ranks:
        return None
    plan = plan_layout(cell.config, vocabulary, Cluster(node, cell.nodes))
    return None if isinstance(plan, Refused) else plan.time.tokens_per_gpu * cell.ranks


def write_report(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write scaling.csv and scaling.png; the files."""
    table, figure = folder / "scaling.csv", folder / "scaling.png"
    with table.open("w", newline="") as file:
        columns = list(dict.fromkeys(name for row in rows for name in row.values))
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.values for row in rows)
    _draw(rows, figure)
    return [table, figure]


def _draw(rows: Sequence[Row], file: Path) -> None:
    figure = new_figure(
        13, 4.6, "Scaling over nodes",
        "means after the warm-up; gray: ideal; dotted: planned; right: mean of the ranks, own is "
        "compute and data, rest is between the logged phases; above: error of the plan",
    )  # fmt: skip
    speed, efficiency, split = figure.subplots(1, 3)
    lines = list(dict.fromkeys(row.line for row in rows))
    for place, line in enumerate(lines):
        its_own = [row for row in rows if row.line == line]
        nodes = [row.cell.nodes for row in its_own]
        style = contender_style(place)
        measured = [row.measures.tokens_per_second for row in its_own]
        label = line or "measured"
        speed.plot(nodes, measured, label=label, **style)
        ideal = [measured[0] / nodes[0] * count for count in nodes]
        speed.plot(nodes, ideal, color="#bbbbbb", lw=1, zorder=0)
        planned = [(row.cell.nodes, row.planned) for row in its_own if row.planned is not None]
        if planned:
            speed.plot(*zip(*planned, strict=True), color=style["color"], ls=":")
            first = planned[0][1] / planned[0][0]
            shares = [(count, tokens / count / first) for count, tokens in planned]
            efficiency.plot(*zip(*shares, strict=True), color=style["color"], ls=":")
        efficiency.plot(nodes, [row.efficiency for row in its_own], label=label, **style)
    counts = sorted({row.cell.nodes for row in rows})
    for axes, title in ((speed, "tokens a second"), (efficiency, "efficiency")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, labels=[str(count) for count in counts], minor=False)
        axes.set_xlabel("nodes")
        axes.set_title(title, fontsize=11, loc="left")
    speed.set_yscale("log")
    efficiency.set_ylim(bottom=0)
    if len(lines) > 1:
        speed.legend(fontsize=8)
    names = [f"{row.cell.nodes}" + (f"\n{row.line}" if row.line else "") for row in rows]
    bottom = [0.0] * len(rows)
    for place, phase in enumerate(rows[0].measures.phases):
        heights = [max(0.0, row.measures.phases[phase]) for row in rows]
        split.bar(range(len(rows)), heights, bottom=bottom, label=phase, color=domain_color(place))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for place, row in enumerate(rows):
        if row.plan_error is not None:
            text = f"{row.plan_error:+.0%}"
            split.annotate(text, (place, bottom[place]), ha="center", va="bottom", fontsize=8)
    split.set_xticks(range(len(rows)), labels=names, fontsize=8)
    split.set_xlabel("nodes")
    split.set_title("seconds of a step", fontsize=11, loc="left")
    split.legend(fontsize=8)
    figure.savefig(file, dpi=110)
