"""The options that record the choices of a run, and replay those of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.option import option
from moe_parallel.config.selection.selection import Selection
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class TracedSelection(Selection):
    """A system whose choices can be recorded, because each is an expert for a token."""

    moe_router_trace: str | None = option(
        None,
        "folder to which training writes which experts each token takes, in every layer and step; "
        "none: off",
    )
    moe_router_replay: str | None = option(
        None,
        "in training, tokens take the experts that this folder of --moe-router-trace names; "
        "probabilities come from the current scores. none: off",
    )

    @property
    def trace_folder(self) -> str | None:
        return self.moe_router_trace

    @property
    def replay_folder(self) -> str | None:
        return self.moe_router_replay

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        trace, replay = self.moe_router_trace, self.moe_router_replay
        if replay is None:
            return
        if self.forced_routing is not None:
            raise InputError(
                f"--moe-router-replay is {replay}, but experts are forced ({self.forced_routing}): "
                "remove one of them"
            )
        if replay == trace:
            raise InputError(
                f"--moe-router-replay and --moe-router-trace are both {replay}, so that the run "
                "would overwrite what it replays: name another folder for the trace"
            )
