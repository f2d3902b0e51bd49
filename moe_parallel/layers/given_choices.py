"""Choices that no score makes: forced workloads, and the recorded choices of an earlier run.

Shape suffixes: T tokens of this rank, S their positions in a sequence, B sequences of a
micro-batch, N sequences of a global batch, L MoE layers, E experts, K slots per token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_parallel.config import Config, TokensChoose
from moe_parallel.config.forced_routing import FLAG, parse_forced_routing
from moe_parallel.errors import InputError
from moe_parallel.selection.choices import Rule
from moe_parallel.selection.forced import (
    Balanced,
    Forced,
    ForcibleRule,
    Hot,
    Replayed,
    Trace,
    WarmUp,
    Workload,
    Zipf,
)
from moe_parallel.selection.segments import BySegment
from moe_parallel.selection.tokens import Tokens, positions
from moe_parallel.telemetry.metrics import read_metrics
from moe_parallel.telemetry.router_trace import REPLAY, RecordedTrace, read_trace


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


class Recorder:
    """Collects the choices of this rank's layers in a step."""

    def __init__(self) -> None:
        self._added: dict[int, list[tuple[Tokens, torch.Tensor]]] = defaultdict(list)

    def add(self, tokens: Tokens, experts_TK: torch.Tensor) -> None:
        """Adds the choices of a micro-batch in one layer. Does not wait for the device."""
        self._added[tokens.layer].append((tokens, experts_TK.to(torch.int16)))

    def take(self, layer: int, experts_NSK: torch.Tensor) -> None:
        """Moves a layer's choices of the step into `experts_NSK`, with 1 added to each."""
        for tokens, experts_TK in self._added.pop(layer, ()):
            first = tokens.first_sequence
            places_S = positions(tokens.share(len(experts_TK)), experts_NSK.device)
            experts_SBK = experts_TK.unflatten(0, (-1, tokens.num_sequences))
            experts_BSK = experts_SBK.transpose(0, 1).to(experts_NSK) + 1
            experts_NSK[first : first + tokens.num_sequences, places_S] = experts_BSK


class Replay:
    """Gives the recorded choices of the step under way to the rules of this rank's layers."""

    def __init__(self) -> None:
        self._layers: list[int] = []
        self._experts_LNSK: np.ndarray[Any, Any] | None = None

    def begin_step(self, layers: Sequence[int], experts_LNSK: np.ndarray[Any, Any]) -> None:
        """Takes the numbers of the MoE layers and the choices of the step that begins."""
        self._layers, self._experts_LNSK = list(layers), experts_LNSK

    def rule(self, rule: Rule) -> Rule:
        """`rule` with the recorded choices. Raises InputError if it has no probs for them."""
        if isinstance(rule, BySegment):  # all tokens of a segment have the choices of its first
            return replace(rule, rule=self._replayed(rule.rule, rule.length))
        return self._replayed(rule, 1)

    def _replayed(self, rule: Rule, every: int) -> Replayed:
        if not isinstance(rule, ForcibleRule):
            raise InputError(
                f"{REPLAY} is set, but {type(rule).__name__} gives no probabilities to experts "
                "that it does not choose itself: leave the flag out, or use another system"
            )
        return Replayed(rule, self.choices, every)

    def choices(self, tokens: Tokens, num_tokens: int, every: int) -> torch.Tensor:
        """The recorded choices of tokens of a micro-batch: see `selection.replayed.Recorded`."""
        assert self._experts_LNSK is not None
        experts_NSK = self._experts_LNSK[self._layers.index(tokens.layer)]
        first = tokens.first_sequence
        places_S = every * positions(tokens.share(num_tokens)).numpy()
        experts_BSK = experts_NSK[first : first + tokens.num_sequences, places_S]
        return torch.from_numpy(experts_BSK.astype(np.int64)).transpose(0, 1).flatten(0, 1)


@dataclass(frozen=True)
class RouterTrace:
    """What the layers of this rank record and replay; None: nothing."""

    recorder: Recorder | None = None
    replay: Replay | None = None

    def rule(self, rule: Rule) -> Rule:
        """The rule of training."""
        return rule if self.replay is None else self.replay.rule(rule)
