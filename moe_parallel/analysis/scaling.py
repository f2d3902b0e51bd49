"""Scaling studies: the same training on more nodes, and what its records show.

FOLDER/NAME/cell.json cell.yaml    a cell: a number of nodes with values of flags
FOLDER/NAME/job job.out run/       the number of its last job, the job's output, and the run
FOLDER/scaling.csv scaling.html    the report
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from moe_parallel.analysis.report.report import report_of
from moe_parallel.analysis.run_history import RunHistory
from moe_parallel.config import Config, make_config, validate
from moe_parallel.config.message import counted
from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import Cluster
from moe_parallel.reading import read_end, read_json, read_word
from moe_parallel.telemetry.metrics import METRICS_FILE, MetricsLine, read_metrics

FINISHED, QUEUED, FAILED, NEW = "finished", "in the queue", "failed", "new"
NODES_AXIS = "nodes"  # the axis that every study has; the others are varied flags
_REMEDY = ": restore it, or move its folder away"


@dataclass(frozen=True)
class ScalingCell:
    """One run: a number of nodes and the options of its training; and its folder."""

    study: Path
    nodes: int
    ranks: int
    varied: Mapping[str, Any]  # values of --vary by option name
    options: Mapping[str, Any]  # raw values by option name

    @property
    def factors(self) -> Mapping[str, Any]:
        """What cells differ in: the number of nodes and the varied flags."""
        return {NODES_AXIS: self.nodes, **self.varied}

    @property
    def name(self) -> str:
        return "_".join(f"{name}={value}" for name, value in self.factors.items())

    def line(self, axis: str) -> str:
        """The cell without its value on the axis, in words."""
        others = {name: value for name, value in self.factors.items() if name != axis}
        return ", ".join(f"{name} {value}" for name, value in others.items())

    @property
    def config(self) -> Config:
        """Raises InputError if the options are wrong."""
        return make_config({**self.options, "save": "unused"})

    def why_not(self) -> str | None:
        """Why this number of ranks cannot train the cell; None if it can.

        Raises InputError if the options are wrong on any number of ranks.
        """
        config = self.config
        try:
            validate(config, self.ranks)
        except InputError as error:
            return str(error)
        return None

    @property
    def folder(self) -> Path:
        return self.study / self.name

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def config_file(self) -> Path:
        return self.folder / "cell.yaml"

    @property
    def job_file(self) -> Path:
        return self.folder / "job"

    @property
    def output(self) -> Path:
        return self.folder / "job.out"

    def write(self) -> None:
        """Write the cell. Raises InputError if the folder has another cell of this name."""
        names = ("nodes", "ranks", "varied", "options")
        text = json.dumps({name: getattr(self, name) for name in names}, indent=1)
        file = self.folder / "cell.json"
        if file.exists() and read_json(file, _REMEDY) != json.loads(text):
            raise InputError(
                f"{self.folder} holds a run with other options: name another folder for this study"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        options = {name.replace("_", "-"): value for name, value in self.options.items()}
        self.config_file.write_text(yaml.safe_dump(options, sort_keys=False))

    @property
    def history(self) -> RunHistory | None:
        """The history of the run. None: it has no record yet."""
        file = self.run / METRICS_FILE
        records = read_metrics(file) if file.exists() else []
        return RunHistory.from_records(records) if records else None

    @property
    def is_finished(self) -> bool:
        history, last = self.history, self.config.training.train_iters
        return history is not None and last is not None and history.last_iteration >= last

    def state(self, queue: Collection[str]) -> str:
        """FINISHED, QUEUED, FAILED or NEW. `queue`: the numbers of the jobs in Slurm's queue."""
        if self.job_file.exists() and read_word(self.job_file) in queue:
            return QUEUED
        if self.is_finished:
            return FINISHED
        return FAILED if self.job_file.exists() else NEW

    @property
    def last_line(self) -> str:
        """The last line of the output of the cell's jobs."""
        said = read_end(self.output).split("\n") if self.output.exists() else []
        return next((line.strip() for line in reversed(said) if line.strip()), "no output")


def parse_vary(words: Sequence[str]) -> dict[str, list[Any]]:
    """`name=1,2` as {option name: values}. Raises InputError."""
    varied: dict[str, list[Any]] = {}
    for word in words:
        name, _, values = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        texts = values.split(",")
        if not key or not all(texts):
            raise InputError(f"--vary {word}: write flag=value,value, as in micro-batch-size=1,2")
        if key in varied:
            raise InputError(f"--vary names {name} twice: give all its values in one word")
        if any("/" in text for text in texts):
            raise InputError(f"--vary {word}: a value names a folder of the study; leave out /")
        try:
            varied[key] = [yaml.safe_load(text) for text in texts]
        except (yaml.YAMLError, LookupError, RecursionError, TypeError, ValueError):
            raise InputError(f"--vary {word[:200]}: a value is not YAML") from None
    return varied


def cells(
    study: Path,
    options: Mapping[str, Any],
    nodes: Sequence[int],
    varied: Mapping[str, Sequence[Any]],
    *,
    ranks_per_node: int,
    weak: bool,
) -> Iterator[ScalingCell]:
    """Every number of nodes with every combination of values.

    Args:
        options: raw values by option name, of the file that all cells share.
        weak: the global batch is that of one node, times the nodes. Otherwise all cells have it.

    Raises InputError if weak scaling has no global batch to multiply.
    """
    for count, values in itertools.product(nodes, itertools.product(*varied.values())):
        chosen = dict(zip(varied, values, strict=True))
        its_own = {**options, **chosen}
        if weak:
            batch = its_own.get("global_batch_size")
            if not isinstance(batch, int):
                raise InputError("--weak: --config has no global-batch-size: give one node's")
            its_own["global_batch_size"] = batch * count
        yield ScalingCell(study, count, count * ranks_per_node, chosen, its_own)


def read_cells(study: Path) -> list[ScalingCell]:
    """The cells that were ever written, by number of nodes."""
    found = []
    for file in study.glob("*/cell.json"):
        try:
            found.append(ScalingCell(study, **read_json(file, _REMEDY)))
        except TypeError:
            raise InputError(f"{file} is not a cell of a study{_REMEDY}") from None
    return sorted(found, key=lambda cell: (cell.nodes, cell.name))


def measures(history: RunHistory, tokens_per_step: int, warm_up: int) -> dict[str, float | None]:
    """Means over the logged steps after the warm-up: the columns of the report.

    tokens_per_second, step_seconds; compute, data, dispatch, pipeline, reduce and rest of a step,
    means over ranks; and, for each step, the time between two, where there are several: save for
    checkpoints, between for evaluations and log lines.

    Raises InputError if no step is left after the warm-up.
    """

    def step_of(records: Sequence[MetricsLine]) -> float:
        return float(np.mean([tokens_per_step / each["tokens_per_second"] for each in records]))

    processes = [
        [each for each in of_process if each["iteration"] > warm_up and "ranks" in each]
        for of_process in history.processes
    ]
    kept = list(itertools.chain(*processes))
    if not kept:
        raise InputError(
            f"--warm-up {warm_up} leaves no logged step: lower it, or train for longer"
        )
    step = step_of(kept)
    parts = {
        name: float(np.mean([each["ranks"][f"{name}_seconds"] for each in kept]))
        for name in ("own", "data", "dispatch", "pipeline", "reduce")
    }
    parts = {"compute": parts.pop("own") - parts["data"], **parts}
    # A rank's own time is a median of the steps of a log line: the rest may be a little below zero.
    parts["rest"] = step - sum(parts.values())

    number, elapsed, save, between = 0, 0.0, None, None
    later: list[MetricsLine] = []
    for records in filter(None, processes):  # the steps of the first record precede its time
        number += records[-1]["iteration"] - records[0]["iteration"]
        elapsed += records[-1]["elapsed_seconds"] - records[0]["elapsed_seconds"]
        later += records[1:]
    if number:
        save = sum(record["save_seconds"] for record in later) / number
        between = elapsed / number - step_of(later) - save
    return {
        "tokens_per_second": tokens_per_step / step,
        "step_seconds": step,
        **{f"{name}_seconds": seconds for name, seconds in parts.items()},
        "save_seconds": save,
        "between_seconds": between,
    }


def axis_of(cells: Sequence[ScalingCell]) -> str:
    """The axis of a study's figure: the nodes if their number differs, otherwise the first flag of
    all cells that has several values."""
    common = [name for name in cells[0].factors if all(name in cell.factors for cell in cells)]
    several = [name for name in common if len({str(cell.factors[name]) for cell in cells}) > 1]
    return (several or [NODES_AXIS])[0]


def rows_of(
    cells: Sequence[ScalingCell], warm_up: int, cluster: Cluster | None = None
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(the rows of the finished cells along the axis, why cells have no plan by their names).

    Args:
        warm_up: the number of first iterations that are left out.
        cluster: one node to plan on; each cell is planned on as many as it had. None: no plans.

    Raises InputError if no cell is finished.
    """
    finished = [cell for cell in cells if cell.is_finished]
    if not finished:
        raise InputError("the study has no finished cell yet: nothing to report")
    axis = axis_of(finished)
    places = list(dict.fromkeys(cell.factors[axis] for cell in finished))
    if all(isinstance(place, int | float) for place in places):
        places.sort()
    finished.sort(key=lambda cell: places.index(cell.factors[axis]))
    rows: list[dict[str, Any]] = []
    reasons: dict[str, str] = {}
    first: dict[str, float] = {}
    for cell in finished:
        training, history = cell.config.training, cell.history
        assert history is not None  # it is finished
        found = measures(history, training.global_batch_size * training.seq_length, warm_up)
        speed = found.pop("tokens_per_second")
        assert speed is not None
        efficiency = speed / cell.nodes / first.setdefault(cell.line(axis), speed / cell.nodes)
        planned = None if cluster is None else _planned(cell, cluster)
        if isinstance(planned, str):
            reasons[cell.name], planned = planned, None
        rows.append({
            "nodes": cell.nodes,
            "ranks": cell.ranks,
            **cell.varied,
            "global_batch_size": training.global_batch_size,
            "tokens_per_second": round(speed, 2),
            "efficiency": round(efficiency, 4),
            **{name: None if s is None else round(s, 6) for name, s in found.items()},
            "planned_tokens_per_second": None if planned is None else round(planned, 2),
            "plan_error": None if planned is None else round(planned / speed - 1, 4),
            "axis": axis,
        })  # fmt: skip
    return rows, reasons


def _planned(cell: ScalingCell, cluster: Cluster) -> float | str:
    """The plan's tokens a second, or the reason why there is no plan."""
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


def write_scaling_report(
    rows: Sequence[Mapping[str, Any]], folder: Path, command: Sequence[str] = ()
) -> list[Path]:
    """Write scaling.csv and its page, scaling.html; the files. `command`: that made them."""
    table, page = folder / "scaling.csv", folder / "scaling.html"
    with table.open("w", newline="") as file:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    page.write_text(report_of([folder], command=command), encoding="utf-8")
    return [table, page]
