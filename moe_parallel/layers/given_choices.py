"""Choices that no score makes: forced workloads, and the recorded choices of an earlier run.

Shape suffixes: T tokens of this rank, S their positions in a sequence, B sequences of a
micro-batch, N sequences of a global batch, L MoE layers, E experts, K slots per token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from moe_parallel.config import Config, TokensChoose
from moe_parallel.config.forced_routing import parse_forced_routing
from moe_parallel.errors import InputError
from moe_parallel.selection.choices import Rule
from moe_parallel.selection.forced import (
    Balanced,
    Forced,
    ForcibleRule,
    Hot,
    Replayed,
    Workload,
    Zipf,
)
from moe_parallel.selection.segments import BySegment
from moe_parallel.selection.tokens import Tokens, positions
from moe_parallel.telemetry.router_trace import REPLAY


@dataclass(frozen=True)
class Forcing:
    """Makes a forced rule of a rule."""

    workload: Workload
    seed: int

    def of(self, rule: ForcibleRule) -> Forced:
        return Forced(rule, self.workload, self.seed)


def build_forcing(config: Config) -> Forcing | None:
    """The forced routing of a configuration. Returns None if the scores choose the experts."""
    selection = config.selection
    if not isinstance(selection, TokensChoose) or selection.moe_router_force_routing is None:
        return None
    given = parse_forced_routing(selection.moe_router_force_routing)
    return Forcing(_WORKLOADS[given.workload](given.argument), config.training.seed)


#: The workload for the number of its name.
_WORKLOADS: dict[str, Callable[[Any], Workload]] = {
    "balanced": lambda _: Balanced(),
    "hot": Hot,
    "zipf": Zipf,
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
