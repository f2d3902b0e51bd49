"""Checkpoints: all that a run needs to continue, in one folder, loadable under any layout.

A checkpoint contains the model, Adam's state, the scheduler, the random states, the scales of
experts in FP8, the position in the data, and copies of small files (config.yaml, the tokenizer).
folder.py describes the files on disk, optimizer.py the common form of every optimizer's state.

On the layout that saved it, a run continues bit for bit. On another layout the weights, Adam's
state and the data position are also the same to the bit; the random states and FP8's scales, which
belong to a rank, start anew.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from moe_parallel.collective_errors import StorageError, agree, on_rank_0
from moe_parallel.errors import InputError
from moe_parallel.platform.megatron import installed_version
from moe_parallel.training.checkpoint.folder import CheckpointFolder, find_checkpoint
from moe_parallel.training.checkpoint.index import stored_shapes
from moe_parallel.training.checkpoint.optimizer import (
    adam_step,
    master_tensors,
    masters_to_read,
    moment_tensors,
    most_precise,
    pieces,
    set_adam_step,
)
from moe_parallel.training.checkpoint.record import (
    FORMAT,
    Expected,
    as_json,
    check_content,
    checked_record,
    rank_share,
)
from moe_parallel.training.checkpoint.saving import Background, Snapshot, Writer
from moe_parallel.training.checkpoint.state import (
    check_tensors,
    fp8_state_facts,
    model_tensors,
    rank_states,
    rank_states_to_read,
    set_module_states,
    set_rank_states,
)
from moe_parallel.training.checkpoint.tensors import read_tensors, sharded_tensors, sharded_values
from moe_parallel.training.checkpoint.upcycling import DenseReader
from moe_parallel.training.optimizer import gather_weights
from moe_parallel.training.text import Stream


@dataclass(frozen=True)
class TrainingState:
    """The progress of a run, which gives its position in the data.

    `unlogged`: the sums of the iterations that the next log line averages, in JSON's types (see
    loop.Interval); None if there are none.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    unlogged: Mapping[str, Any] | None = None


@dataclass
class Checkpointer:
    """Saves and loads the checkpoints of one run. All ranks call each method together.

    Attributes:
        directory: the folder given to --save; created when first needed.
        keep_last: number of checkpoints to keep; None keeps all.
        fingerprint: facts that a checkpoint must share with the configuration to be loaded
            (sizes, expert selection), by the names of their flags; JSON values.
        layout: sizes of the parallel groups and the kind of device. Random states are restored
            only if it and the number of ranks are equal.
        files: by name, the text of a small file or the path of a file or folder to copy.
        states: by flag, the values of the options that decide which numbers move after a step;
            for the message if a checkpoint has other numbers.
        stream: the samples in which the position that is saved counts; None: unknown.
        same_schedule: whether a checkpoint's schedule must equal the configured one. Otherwise the
            configured schedule continues at the checkpoint's step.
        background: writes the checkpoints of `begin_save`; None: they cannot be asked for.
    """

    directory: Path
    _: KW_ONLY
    keep_last: int | None
    fingerprint: Mapping[str, object]
    layout: Mapping[str, int | str]
    files: Mapping[str, str | Path]
    states: Mapping[str, object] = field(default_factory=dict)
    stream: Stream | None = None
    same_schedule: bool = True
    background: Background | None = None

    def __post_init__(self) -> None:
        self.folder = CheckpointFolder(self.directory)
        self.fingerprint = as_json(self.fingerprint)
        self.layout = {**self.layout, "world_size": dist.get_world_size()}
        self._writer = Writer(self.folder, self.files, self.keep_last)

    def of_model(self, fingerprint: Mapping[str, object]) -> "Checkpointer":
        """The checkpoints of another model in the same folder, such as a dense warm-up model."""
        other = copy.copy(self)
        other.fingerprint = as_json(fingerprint)
        return other

    def latest(self) -> Path | None:
        """The newest checkpoint under `directory`, or None."""
        return next(iter(self.folder.newest_first()), None)

    def save(
        self,
        state: TrainingState,
        model_chunks: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer | None,
        scheduler: OptimizerParamScheduler | None,
    ) -> Path:
        """Write a checkpoint and return its path.

        Raises:
            NotSaved: on every rank, if a rank could not write; see `Writer.write`.
            Diverged: on every rank, if a value to be saved is not finite.
        """
        snapshot = self._snapshot(state, model_chunks, optimizer, scheduler)
        self._writer.check_finite(snapshot)
        return self._writer.write(snapshot)

    def begin_save(self, *state_and_models: Any) -> None:
        """Begin a checkpoint, as of `save`, that `background` writes while training continues.

        The weights and the optimizer's state must not change before `background.wait_for_copy`,
        and no other checkpoint may be saved before `background.finish`.

        Raises:
            NoMemory: on every rank, if there is no memory for a copy; `save` needs none.
        """
        assert self.background is not None
        self.background.begin(self._snapshot(*state_and_models), self._writer)

    def confirm(self, iteration: int) -> None:
        """Record that the weights of this newest checkpoint gave a finite loss. Collective.

        --keep-last then no longer needs an extra earlier checkpoint.
        """
        keep_last = self.keep_last
        if keep_last is not None:
            with suppress(StorageError):  # the next save deletes the remaining ones
                on_rank_0(lambda: self.folder.delete_oldest(iteration, keep_last))

    def _snapshot(
        self,
        state: TrainingState,
        model_chunks: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer | None,
        scheduler: OptimizerParamScheduler | None,
    ) -> Snapshot:
        gather_weights(model_chunks)
        model = model_tensors(model_chunks)
        values = [*sharded_values(model), *rank_states(model_chunks)]
        held = [] if optimizer is None else pieces(optimizer, model)
        values += [*moment_tensors(held), *master_tensors(held)]
        record = {
            "format": FORMAT,
            "training": asdict(state),
            "stream": None if self.stream is None else asdict(self.stream),
            "adam_step": None,
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "layout": self.layout,
            "fp8_state": fp8_state_facts(model_chunks),
            "fingerprint": self.fingerprint,
            "versions": {"torch": torch.__version__, "megatron-core": installed_version()},
        }
        step = None if optimizer is None else adam_step(held)
        return Snapshot(state.iteration, values, step, record)

    def load(
        self,
        path: Path,
        chunks: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer | None,
        scheduler: OptimizerParamScheduler | None,
        *,
        dense: Expected | None = None,
        seed: int = 0,
    ) -> TrainingState:
        """Load a checkpoint, or the latest one in a folder, into models, optimizer and scheduler.

        Without a scheduler only the weights are loaded, with the optimizer's fp32 copies of them:
        for a new run, evaluation or conversion.

        With `dense`, the required properties of the checkpoint of a dense model, that is loaded
        into a model of experts: see model/upcycling.py. Weights that only the model of experts has
        stay as they are; their moments stay zero. The schedule is that of `scheduler`, at the
        iteration of the checkpoint. `seed` is of the random values that make experts with equal
        weights differ.

        Raises:
            InputError: on every rank, if there is no checkpoint at `path`, if it is incomplete, or
                if it does not fit the configuration; the message lists what differs.
        """
        expected = dense or Expected(self.fingerprint, self.same_schedule)
        try:
            checkpoint = agree(lambda: find_checkpoint(path))
            record = agree(lambda: checked_record(checkpoint, expected, scheduler))
            agree(lambda: check_content(checkpoint, record["files"], rank_share()))
            self._read(
                checkpoint, record, chunks, optimizer, scheduler, None if dense is None else seed
            )
        except StorageError as error:
            raise InputError(
                f"--load {path}: cannot read the checkpoint: {error}; "
                "check the disk, or load another checkpoint"
            ) from error
        known = (each.name for each in fields(TrainingState))
        return TrainingState(**{name: record["training"].get(name) for name in known})

    def _read(
        self,
        checkpoint: Path,
        record: Mapping[str, Any],
        chunks: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer | None,
        scheduler: OptimizerParamScheduler | None,
        seed: int | None,
    ) -> None:
        """`seed`: of the random values for experts that start from dense layers; None: load."""
        model = model_tensors(chunks)
        held = [] if optimizer is None else pieces(optimizer, model)
        stored = agree(lambda: stored_shapes(checkpoint))
        wanted = most_precise(sharded_tensors(model), stored)
        if scheduler is not None:
            wanted += moment_tensors(held)
        masters = masters_to_read(held, stored)
        objects: list[ShardedObject] = []
        dense = None
        if seed is None:
            objects = [v for v in sharded_values(model) if isinstance(v, ShardedObject)]
        else:
            dense = DenseReader(stored, seed)
            wanted, masters = dense.same(wanted), dense.same(masters)
            wanted += dense.parts()
        check_tensors(checkpoint, wanted, stored, self.states)

        if record["layout"] == self.layout:
            objects += rank_states_to_read(chunks, record, goes_on=scheduler is not None)
        loaded = read_tensors([*wanted, *masters, *objects], checkpoint)
        if dense is not None:
            dense.fill()
        set_module_states(chunks, model, loaded)
        if scheduler is not None:
            set_adam_step(held, record["adam_step"])
            scheduler.num_steps = 0
            scheduler.step(increment=record["scheduler"]["num_steps"])
        set_rank_states(chunks, loaded)
