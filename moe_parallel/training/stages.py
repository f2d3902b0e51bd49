"""The models that a run trains one after the other: a dense model to warm up, then experts.

A checkpoint records whether it is dense and how far its run has come. Therefore a run can be
stopped at any moment and continues the same way: with the dense model until the warm-up ends, then
with experts, after one upcycling. Most runs have only one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_parallel.collective_errors import agree
from moe_parallel.config import Config
from moe_parallel.config.moe import dense_warmup_iters
from moe_parallel.errors import InputError
from moe_parallel.model.upcycling import change_by_upcycling
from moe_parallel.parallel import Groups
from moe_parallel.telemetry.progress import Progress
from moe_parallel.training.checkpoint.checkpointer import Checkpointer, TrainingState
from moe_parallel.training.checkpoint.folder import find_checkpoint
from moe_parallel.training.checkpoint.record import read_record
from moe_parallel.training.engine import Engine
from moe_parallel.training.run_folder import dense_checkpoints, dense_twin, expected_dense


@dataclass(frozen=True)
class Stage:
    """A model to train up to an iteration, and its checkpoints."""

    engine: Engine
    checkpoints: Checkpointer
    state: TrainingState  # at the start of the stage
    until: int
    note: str | None  # a message on how the stage starts


class Stages:
    """Builds the stages of a run. All ranks call each method together."""

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        groups: Groups,
        checkpoints: Checkpointer,
        progress: Progress | None = None,
        token_counts: Sequence[int] = (),
    ) -> None:
        """Raises InputError if the configuration lacks what dense warm-up needs.

        `token_counts`: how often each token id occurs in the training text, if that is needed.
        """
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
        self.progress = progress
        self.token_counts = token_counts

    def first(self) -> Stage:
        """The stage in which the run starts, or continues from --load. Raises InputError."""
        load = self.config.checkpoint.load
        return self._warm_up(load) if self._warms_up(load) else self._last(load)

    def second(self) -> Stage:
        """The stage after the dense warm-up, from the newest checkpoint in --save."""
        return self._last(self.config.checkpoint.save)

    def _warms_up(self, load: str | None) -> bool:
        iterations = dense_warmup_iters(self.config)
        if load is None or not iterations:
            return iterations > 0
        dense, iteration = _kind(load)
        return dense and iteration < iterations

    def _warm_up(self, load: str | None) -> Stage:
        checkpoints = dense_checkpoints(self.config, self.vocab_size, self.checkpoints)
        engine = self._engine(dense_twin(self.config))
        state = TrainingState(0, 0, 0)
        if load is not None:
            state = checkpoints.load(Path(load), engine.chunks, engine.optimizer, engine.scheduler)
        until = dense_warmup_iters(self.config)
        note = f"dense until iteration {until}, with experts from then on"
        return Stage(engine, checkpoints, state, until, note)

    def _last(self, load: str | None) -> Stage:
        config, moe = self.config, self.config.moe
        engine = self._engine(config)
        state, note = TrainingState(0, 0, 0), None
        upcycles = moe.moe_use_upcycling or moe.moe_dense_warmup_percent > 0
        if load is not None and upcycles and _kind(load)[0]:
            of_dense = self.checkpoints.load(
                Path(load),
                engine.chunks,
                engine.optimizer,
                None if config.checkpoint.finetune else engine.scheduler,
                dense=expected_dense(config, self.vocab_size),
                seed=config.training.seed,
            )
            if not config.checkpoint.finetune:
                state = replace(of_dense, unlogged=None)  # its sums are those of the dense layers
            note = (
                f"every expert starts as the dense layer of {load} at iteration {state.iteration}"
            )
            if (change := change_by_upcycling(config)) is not None:
                note += f"; the model computes something else then: {change}"
        elif load is not None and config.checkpoint.finetune:
            # A new run with the weights of `load`; the optimizer copies them.
            loaded = self.checkpoints.load(Path(load), engine.chunks, engine.optimizer, None)
            note = f"the weights are those of {load} at iteration {loaded.iteration}"
        elif load is not None and config.training.skip_train:
            state = self.checkpoints.load(Path(load), engine.chunks, None, None)
        elif load is not None:
            state = self.checkpoints.load(
                Path(load), engine.chunks, engine.optimizer, engine.scheduler
            )
        return Stage(engine, self.checkpoints, state, config.training.train_iters, note)

    def _engine(self, config: Config) -> Engine:
        background = self.checkpoints.background
        before_update = None if background is None else background.wait_for_copy
        return Engine(
            config, self.vocab_size, self.groups, self.progress, before_update, self.token_counts
        )


def _kind(load: str) -> tuple[bool, int]:
    """Whether a checkpoint is of a dense model, and its iteration. Collective."""
    record = agree(lambda: read_record(find_checkpoint(Path(load))))
    return record["fingerprint"].get("--num-experts") is None, record["training"]["iteration"]
