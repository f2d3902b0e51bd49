"""The models that a run trains one after the other: dense layers to warm up, then experts.

A checkpoint says itself whether it is dense, and how far its run has come. So a run that was
stopped at any moment goes on the same way: dense as long as the warm-up lasts, then, once, from
dense layers to experts. Most runs have experts, or none, from the first step: one stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from moe_parallel.collective_errors import agree
from moe_parallel.config import Config
from moe_parallel.config.dense_twin import dense_twin
from moe_parallel.config.upcycling import dense_warmup_iters
from moe_parallel.errors import InputError
from moe_parallel.model.upcycling import change_by_upcycling
from moe_parallel.parallel import Groups
from moe_parallel.training.checkpoint.checkpointer import Checkpointer, TrainingState
from moe_parallel.training.checkpoint.folder import find_checkpoint
from moe_parallel.training.checkpoint.record import read_record
from moe_parallel.training.engine import Engine
from moe_parallel.training.run_folder import dense_checkpoints, expected_dense


@dataclass(frozen=True)
class Stage:
    """A model to train until an iteration, and its checkpoints."""

    engine: Engine
    checkpoints: Checkpointer
    state: TrainingState  # so far
    until: int
    note: str | None  # what the user should know of how it starts


class Stages:
    """Makes the stages of a run. All ranks call each method together."""

    def __init__(
        self, config: Config, vocab_size: int, groups: Groups, checkpoints: Checkpointer
    ) -> None:
        """Raises InputError where the run lacks what it takes to go from dense to experts."""
        moe, checkpoint = config.moe, config.checkpoint
        if moe.moe_use_upcycling and checkpoint.load is None:
            raise InputError(
                "--moe-use-upcycling starts from a dense checkpoint: name its run by --load"
            )
        if moe.moe_dense_warmup_percent and checkpoint.save is None:
            raise InputError(
                f"--moe-dense-warmup-percent {moe.moe_dense_warmup_percent} ends with a "
                "checkpoint, which the experts start from: set --save"
            )
        self.config = config
        self.vocab_size = vocab_size
        self.groups = groups
        self.checkpoints = checkpoints

    def first(self) -> Stage:
        """The stage in which the run begins, or goes on from --load. Raises InputError."""
        load = self.config.checkpoint.load
        return self._warm_up(load) if self._warms_up(load) else self._last(load)

    def second(self) -> Stage:
        """What follows the dense warm-up, whose last checkpoint is the newest in --save."""
        return self._last(self.config.checkpoint.save)

    def _warms_up(self, load: str | None) -> bool:
        iterations = dense_warmup_iters(self.config)
        if load is None or not iterations:
            return iterations > 0
        dense, iteration = _kind(load)
        return dense and iteration < iterations

    def _warm_up(self, load: str | None) -> Stage:
        checkpoints = dense_checkpoints(self.config, self.vocab_size, self.checkpoints)
        engine = Engine(dense_twin(self.config), self.vocab_size, self.groups)
        state = TrainingState(0, 0, 0)
        if load is not None:
            state = checkpoints.load(Path(load), engine.chunks, engine.optimizer, engine.scheduler)
        until = dense_warmup_iters(self.config)
        note = f"dense until iteration {until}, with experts from then on"
        return Stage(engine, checkpoints, state, until, note)

    def _last(self, load: str | None) -> Stage:
        engine = Engine(self.config, self.vocab_size, self.groups)
        state, note = TrainingState(0, 0, 0), None
        if load is not None and self._upcycles(load):
            state = self._upcycled(load, engine)
            note = self._note(load, state)
        elif load is not None and self.config.checkpoint.finetune:
            note = self._take_weights(load, engine)
        elif load is not None:
            state = self.checkpoints.load(
                Path(load), engine.chunks, engine.optimizer, engine.scheduler
            )
        return Stage(engine, self.checkpoints, state, self.config.training.train_iters, note)

    def _take_weights(self, load: str, engine: Engine) -> str:
        """Start a run of its own from the weights of another, and say from which."""
        loaded = self.checkpoints.load(Path(load), engine.chunks, None, None)
        engine.optimizer.reload_model_params()  # its own copies, where it has some
        return f"the weights are those of {load} at iteration {loaded.iteration}"

    def _upcycles(self, load: str) -> bool:
        moe = self.config.moe
        return (moe.moe_use_upcycling or moe.moe_dense_warmup_percent > 0) and _kind(load)[0]

    def _upcycled(self, load: str, engine: Engine) -> TrainingState:
        state = self.checkpoints.upcycle(
            Path(load),
            engine.chunks,
            engine.optimizer,
            engine.scheduler,
            expected_dense(self.config, self.vocab_size),
            self.config.training.seed,
        )
        return replace(state, unlogged=None)  # of other layers

    def _note(self, load: str, state: TrainingState) -> str:
        note = f"every expert starts as the dense layer of {load} at iteration {state.iteration}"
        change = change_by_upcycling(self.config)
        return (
            note if change is None else f"{note}; the model computes something else then: {change}"
        )


def _kind(load: str) -> tuple[bool, int]:
    """Whether a checkpoint is of a dense model, and its iteration. Collective."""
    record = agree(lambda: read_record(find_checkpoint(Path(load))))
    return record["fingerprint"].get("--num-experts") is None, record["training"]["iteration"]
