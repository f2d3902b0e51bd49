"""The workload of --moe-router-force-routing that belongs to a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_parallel.config import Config, TokensChoose
from moe_parallel.config.forced_routing import FLAG, parse_forced_routing
from moe_parallel.errors import InputError
from moe_parallel.selection.forced import (
    Balanced,
    Forced,
    ForcibleRule,
    Hot,
    Trace,
    WarmUp,
    Workload,
    Zipf,
)
from moe_parallel.telemetry.metrics import read_metrics
from moe_parallel.telemetry.router_trace import RecordedTrace, read_trace


@dataclass(frozen=True)
class Forcing:
    """Makes a forced rule of a rule."""

    workload: Workload
    seed: int

    def of(self, rule: ForcibleRule) -> Forced:
        return Forced(rule, self.workload, self.seed)


def build_forcing(config: Config) -> Forcing | None:
    """The forced routing of a configuration. Returns None if the scores choose the experts.

    Raises InputError if its trace cannot be read.
    """
    selection = config.selection
    if not isinstance(selection, TokensChoose) or selection.moe_router_force_routing is None:
        return None
    given = parse_forced_routing(selection.moe_router_force_routing)
    return Forcing(_WORKLOADS[given.workload](given.argument), config.training.seed)


def read_loads(file: str) -> Trace:
    """The loads in a folder of --moe-router-trace, a metrics.jsonl, or in lines of the same form.

    A record of a metrics.jsonl has `iteration`, the last one that it covers, and `layers`, a list
    of objects with `layer` (from 1) and `tokens_per_expert`. Records without layers are skipped. A
    run with --log-interval 1 records every iteration; otherwise a record holds for all iterations
    since the one before. Raises InputError.
    """
    if Path(file).is_dir():
        recorded = read_trace(file, FLAG)
        return Trace(recorded.iterations, CountedLoads(recorded))
    ends: list[int] = []
    loads: list[dict[int, list[float]]] = []
    for record in read_metrics(Path(file)):
        layers = record.get("layers")
        if not layers:
            continue
        try:
            end = int(record["iteration"])
            load = {int(layer["layer"]): _load(layer["tokens_per_expert"]) for layer in layers}
        except (LookupError, TypeError, ValueError) as error:
            raise InputError(
                f"--moe-router-force-routing: a line in {file} has no loads: each of its layers "
                "needs `layer` and `tokens_per_expert`"
            ) from error
        if end <= (ends[-1] if ends else 0):
            raise InputError(
                f"--moe-router-force-routing: in {file} iteration {end} is not after "
                f"{ends[-1] if ends else 0}: sort its lines and count from 1"
            )
        ends.append(end)
        loads.append(load)
    if not ends:
        raise InputError(
            f"--moe-router-force-routing: {file} has no line with layers: name the metrics.jsonl "
            "of a run with experts"
        )
    return Trace(ends, loads)


class CountedLoads:
    """The loads in the steps of --moe-router-trace, counted when they are asked for."""

    def __init__(self, trace: RecordedTrace) -> None:
        self._trace = trace

    def __getitem__(self, number: int, /) -> dict[int, list[float]]:
        shape, step = self._trace.shape, self._trace.step(self._trace.iterations[number])
        bins = shape.num_experts + 1  # the first is that of empty slots
        return {
            layer: np.bincount(experts_NSK.ravel() + 1, minlength=bins)[1:].tolist()
            for layer, experts_NSK in zip(shape.layers, step.experts_LNSK, strict=True)
        }


def _load(tokens_per_expert: list[float]) -> list[float]:
    load_E = [float(tokens) for tokens in tokens_per_expert]
    if not load_E or min(load_E) < 0 or not sum(load_E) < float("inf"):
        raise ValueError(load_E)
    return load_E


#: The workload for the number or the file of its name.
_WORKLOADS: dict[str, Callable[[Any], Workload]] = {
    "balanced": lambda _: Balanced(),
    "hot": Hot,
    "zipf": Zipf,
    "warmup": WarmUp,
    "trace": read_loads,
}
