"""When a stage's checkpoints are written, waited for and confirmed, and what the user is told."""

from __future__ import annotations

from typing import Any

from moe_parallel.collective_errors import exchange
from moe_parallel.telemetry.sinks import Telemetry
from moe_parallel.training.checkpoint.checkpointer import TrainingState
from moe_parallel.training.checkpoint.folder import checkpoint_name
from moe_parallel.training.checkpoint.snapshot import NoMemory
from moe_parallel.training.checkpoint.writer import NotSaved
from moe_parallel.training.stages import Stage


class Saves:
    """The checkpoints of a stage. All ranks call each method together, except `is_writing`."""

    def __init__(self, stage: Stage, telemetry: Telemetry, *, has_folder: bool) -> None:
        """Collective. `has_folder`: whether there is a --save; without it, nothing may be saved."""
        self._checkpoints = stage.checkpoints
        self._background = stage.checkpoints.background
        self._engine = stage.engine
        self._telemetry = telemetry
        # The iteration of the run's latest checkpoint, if this stage has loaded or written it.
        # Rank 0 answers for all: a network disk may show the others an older folder.
        latest = exchange(stage.checkpoints.latest() if has_folder else None)[0]
        loaded = stage.state.iteration
        found = latest is not None and latest.name == checkpoint_name(loaded)
        self._saved_at = loaded if found else None
        self._said: set[str] = set()

    def save(self, state: TrainingState, *, can_wait: bool) -> None:
        """Write a checkpoint, unless it exists already.

        With `can_wait`, a failed write is only a warning, and with --async-save the checkpoint is
        written during training. Only one is written at a time: this waits for the one before.
        """
        if can_wait and self._background is not None and self._background.pending is not None:
            self._say_once(
                "waiting",
                f"--async-save: the next checkpoint is due, and that of iteration "
                f"{self._background.pending} is still being written: training waits for it; a "
                "longer --save-interval avoids this",
            )
        self.finish(state.iteration)
        if self._saved_at == state.iteration:
            return
        self._telemetry.sync()  # a checkpoint assumes that all earlier records are in the log
        engine = self._engine
        content = (state, engine.chunks, engine.optimizer, engine.scheduler)
        if can_wait and self._begin(*content):
            return
        try:
            path = self._checkpoints.save(*content)
        except NotSaved as error:
            if not can_wait:
                raise
            self._warn(error)
            return
        self._saved_at = state.iteration
        self._telemetry.say(f"saved {path}")
        self._tell_stuck()

    def is_writing(self) -> bool:
        """Whether this rank is writing a checkpoint during training."""
        return self._background is not None and self._background.is_writing()

    def finish(self, iteration: int) -> None:
        """Wait for the checkpoint that is written during training, if there is one.

        `iteration`: the number of steps with a finite loss so far.
        """
        if self._background is None or self._background.pending is None:
            return
        written = self._background.pending
        try:
            path = self._background.finish()
        except NotSaved as error:
            self._warn(error)
            return
        self._saved_at = written
        self._telemetry.say(f"saved {path}")
        if written < iteration:  # a later step had a finite loss
            self._checkpoints.confirm(written)
        self._tell_stuck()

    def confirm(self, iteration: int) -> None:
        """The weights of this iteration have a finite loss: confirm its checkpoint, if there is
        one. Call it before the next checkpoint."""
        if self._saved_at == iteration:
            self._checkpoints.confirm(iteration)
            self._tell_stuck()

    def _begin(self, *content: Any) -> bool:
        """Begin to write a checkpoint during training; returns whether it has begun."""
        if self._background is None:
            return False
        try:
            self._checkpoints.begin_save(*content)
        except NoMemory as error:
            self._say_once(
                "memory", f"warning: --async-save: {error}; training waits for the checkpoint"
            )
            return False
        return True

    def _warn(self, error: NotSaved) -> None:
        self._telemetry.say(f"warning: {error}; training continues without it")

    def _tell_stuck(self) -> None:
        for path, why in self._checkpoints.folder.stuck.items():
            self._say_once(
                str(path), f"warning: {path} cannot be deleted ({why}): delete it by hand"
            )

    def _say_once(self, topic: str, text: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            self._telemetry.say(text)
