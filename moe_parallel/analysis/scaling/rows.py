"""The finished cells of a scaling study, each with its efficiency and its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_parallel.analysis.scaling.folder import CellFolder
from moe_parallel.analysis.scaling.grid import ScalingCell
from moe_parallel.analysis.scaling.measures import Measures
from moe_parallel.config.message import counted
from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import Cluster

NODES_AXIS = "nodes"  # the axis that every study has; the others are varied flags


@dataclass(frozen=True)
class Row:
    """A finished cell."""

    cell: ScalingCell
    axis: str
    measures: Measures
    efficiency: float  # tokens a second and node, over those of the first cell of its line
    planned: float | None  # tokens a second
    no_plan: str | None  # the reason

    @property
    def place(self) -> Any:
        """The value on the axis."""
        return factors_of(self.cell)[self.axis]

    @property
    def line(self) -> str:
        """The cells that differ only on the axis have the same."""
        return line_of(self.cell, self.axis)

    @property
    def plan_error(self) -> float | None:
        """Planned over measured tokens a second, minus 1."""
        return None if self.planned is None else self.planned / self.measures.tokens_per_second - 1

    @property
    def values(self) -> dict[str, object]:
        """The columns of the CSV."""
        planned, measured = self.planned, self.measures.tokens_per_second
        save, between = self.measures.save_seconds, self.measures.between_seconds
        return {
            "nodes": self.cell.nodes,
            "ranks": self.cell.ranks,
            **self.cell.varied,
            "global_batch_size": self.cell.config.training.global_batch_size,
            "tokens_per_second": round(measured, 2),
            "efficiency": round(self.efficiency, 4),
            "step_seconds": round(self.measures.step_seconds, 6),
            **{f"{name}_seconds": round(s, 6) for name, s in self.measures.phases.items()},
            "save_seconds": None if save is None else round(save, 6),
            "between_seconds": None if between is None else round(between, 6),
            "planned_tokens_per_second": None if planned is None else round(planned, 2),
            "plan_error": None if self.plan_error is None else round(self.plan_error, 4),
        }


def factors_of(cell: ScalingCell) -> Mapping[str, Any]:
    """What cells differ in: the number of nodes and the varied flags."""
    return {NODES_AXIS: cell.nodes, **cell.varied}


def line_of(cell: ScalingCell, axis: str) -> str:
    """The cell without its value on the axis. Nodes are named only if they are not the axis."""
    others = {name: value for name, value in factors_of(cell).items() if name != axis}
    return ", ".join(f"{name} {value}" for name, value in others.items())


def axis_of(cells: Sequence[ScalingCell], named: str | None) -> str:
    """The axis of a study's figure: the named one, or else what the study varies.

    Unnamed, it is the nodes if their number differs, otherwise the first flag with several values.
    Raises InputError if `named` is not a factor of every cell.
    """
    factors = factors_of(cells[0])
    common = [name for name in factors if all(name in factors_of(cell) for cell in cells)]
    if named is not None:
        name = named.removeprefix("--").replace("-", "_")
        if name not in common:
            raise InputError(f"--over {named}: the cells have {', '.join(common)}")
        return name
    several = [name for name in common if len({str(factors_of(c)[name]) for c in cells}) > 1]
    return (several or [NODES_AXIS])[0]


def rows_of(
    folders: Sequence[CellFolder],
    warm_up: int,
    cluster: Cluster | None = None,
    over: str | None = None,
) -> list[Row]:
    """The rows of the finished cells, along the axis.

    Args:
        warm_up: the number of first iterations that are left out.
        cluster: one node to plan on; each cell is planned on as many as it had.
        over: the axis; None: see `axis_of`.

    Raises InputError if no cell is finished.
    """
    finished = [each for each in folders if each.is_finished]
    if not finished:
        raise InputError("the study has no finished cell yet: nothing to report")
    axis = axis_of([each.cell for each in finished], over)
    places = _in_order([factors_of(each.cell)[axis] for each in finished])
    finished.sort(key=lambda each: places.index(factors_of(each.cell)[axis]))
    rows: list[Row] = []
    first: dict[str, float] = {}
    for each in finished:
        cell, training = each.cell, each.cell.config.training
        tokens = training.global_batch_size * training.seq_length
        history = each.history
        assert history is not None  # it is finished
        measures = Measures.of(history, tokens, warm_up)
        per_node = measures.tokens_per_second / cell.nodes
        efficiency = per_node / first.setdefault(line_of(cell, axis), per_node)
        plan = _planned(cell, cluster)
        planned, no_plan = (None, plan) if isinstance(plan, str) else (plan, None)
        rows.append(Row(cell, axis, measures, efficiency, planned, no_plan))
    return rows


def _in_order(values: Sequence[Any]) -> list[Any]:
    """The different values: numbers by size, others in their order in the study."""
    different = list(dict.fromkeys(values))
    numbers = all(isinstance(value, int | float) for value in different)
    return sorted(different) if numbers else different


def _planned(cell: ScalingCell, cluster: Cluster | None) -> float | str:
    """The plan's tokens a second, or the reason why there is no plan."""
    if cluster is None:
        return "--node is not set"
    node = cluster.node
    if node.gpus * cell.nodes != cell.ranks:
        has = f"{counted(cell.ranks, 'rank')} on {counted(cell.nodes, 'node')}"
        return f"it has {has}, and {node.name} has {node.gpus}"
    from moe_parallel.plan.search import Refused, plan_layout, vocabulary_of  # imports Megatron

    try:
        config = cell.config
        plan = plan_layout(config, vocabulary_of(config), replace(cluster, nodes=cell.nodes))
    except InputError as error:
        return str(error)
    return plan.reason if isinstance(plan, Refused) else plan.time.tokens_per_gpu * cell.ranks
