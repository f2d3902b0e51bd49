"""--moe-router-trace and --moe-router-replay of a run.

The trace is the same in every layout: each rank fills in the choices of its tokens, rank 0 receives
one layer after another, and holds one step in memory.

Shape suffixes: N sequences of a global batch, S tokens of a sequence, K slots per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_parallel.collective_errors import StorageError, agree, on_rank_0
from moe_parallel.config import Config, Selection
from moe_parallel.copies import copied_to
from moe_parallel.errors import InputError
from moe_parallel.layers.given_choices import Recorder, Replay, RouterTrace
from moe_parallel.model.forward import Batch
from moe_parallel.parallel import Groups
from moe_parallel.telemetry.router_trace import (
    REPLAY,
    TRACE,
    RecordedTexts,
    RecordedTrace,
    TraceShape,
    TraceStep,
    TraceWriter,
    check_shape,
    crc_of,
    read_replay,
)
from moe_parallel.training.run_folder import goes_on_here


def trace_shape(config: Config) -> TraceShape:
    """The sizes of the trace of a run with experts."""
    num_scores = config.num_experts + config.selection.free_experts
    return TraceShape(
        tuple(number for number, moe in enumerate(config.moe_layers, start=1) if moe),
        num_scores,
        config.training.global_batch_size,
        config.training.seq_length,
        config.selection.choices_per_token or num_scores,
    )


class RunTrace:
    """Records the choices of a run, or replays earlier ones. All ranks call each method together.

    `layers` is what the layers of this rank use. The folders are opened at the first step, because
    a run that only evaluates needs none.
    """

    def __init__(self, config: Config, selection: Selection, groups: Groups) -> None:
        self._config = config
        self._shape = trace_shape(config)
        self._groups = groups
        self._trace, self._replay = selection.trace_folder, selection.replay_folder
        self.layers = RouterTrace(
            None if self._trace is None else Recorder(),
            None if self._replay is None else Replay(),
        )
        self._begun = False
        self._done = 0
        self._writer: TraceWriter | None = None
        self._recorded: RecordedTrace | RecordedTexts | None = None
        self._text_N = torch.zeros(0)

    def begin_step(self, done: int, batches: Sequence[Batch]) -> None:
        """Called before a step.

        Args:
            done: the number of steps before it.
            batches: all micro-batches of this rank.

        Raises InputError on every rank, if a file is not of a run like this one.
        """
        if not self._begun:
            with self._writing():
                agree(lambda: self._open(done))
            self._begun = True
        self._done = done
        self._text_N = self._text_of(batches)
        if self._recorded is not None and self.layers.replay is not None:
            recorded = self._recorded
            step = agree(lambda: self._checked(self._step_of(recorded)))
            self.layers.replay.begin_step(self._shape.layers, step.experts_LNSK)

    def _step_of(self, recorded: RecordedTrace | RecordedTexts) -> TraceStep:
        if isinstance(recorded, RecordedTexts):
            return recorded.step(self._text_N.numpy())
        return recorded.step(self._done + 1)

    def end_step(self, device: torch.device) -> None:
        """Called after a step: its choices are on the disk on return. Raises InputError."""
        if self.layers.recorder is None:
            return
        shape, experts_LNSK = self._shape, []
        text_N = _greatest(copied_to(device, self._text_N))
        for layer in shape.layers:
            size = (shape.sequences, shape.length, shape.slots)
            experts_NSK = torch.zeros(size, dtype=torch.int32, device=device)
            self.layers.recorder.take(layer, experts_NSK)
            experts_NSK = _greatest(experts_NSK)
            if dist.get_rank() == 0:
                experts_LNSK.append((experts_NSK - 1).short().cpu().numpy())
        with self._writing():
            on_rank_0(lambda: self._append(text_N, experts_LNSK))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            raise InputError(
                f"{TRACE} {self._trace} cannot be written ({error}): make room and continue with "
                "--load, or leave it out"
            ) from error

    def _append(self, text_N: torch.Tensor, experts_LNSK: list[np.ndarray[Any, Any]]) -> None:
        assert self._writer is not None
        step = TraceStep(text_N.cpu().numpy(), np.stack(experts_LNSK))
        self._writer.append(self._done + 1, step)

    def _open(self, done: int) -> None:
        if self._replay is not None:
            self._recorded = recorded = read_replay(self._replay, REPLAY)
            shape = recorded.shape
            if isinstance(recorded, RecordedTexts):
                shape = replace(shape, sequences=self._shape.sequences)
            check_shape(self._replay, REPLAY, shape, self._shape)
            if isinstance(recorded, RecordedTrace):
                self._check_steps(recorded.iterations, done)
        if self._trace is not None and dist.get_rank() == 0:
            self._writer = TraceWriter(
                Path(self._trace), self._shape, done, goes_on=goes_on_here(self._config)
            )

    def _check_steps(self, iterations: range, done: int) -> None:
        """Raise InputError unless the replay has all steps that this run trains."""
        last, leaves = self._config.training.train_iters, self._config.training.exit_interval
        if leaves is not None:
            last = min(last, (done // leaves + 1) * leaves)
        first_there, last_there = iterations[0], iterations[-1]
        if first_there > done + 1 or last_there < last:
            raise InputError(
                f"{REPLAY} {self._replay} has the iterations {first_there} to {last_there}, and "
                f"this run trains {done + 1} to {last}: record those too, or end earlier with "
                "--exit-interval"
            )

    def _text_of(self, batches: Sequence[Batch]) -> torch.Tensor:
        """The CRC-32 of this rank's sequences, and 0 for those of other ranks: int64 [N]."""
        dp = self._groups.dp
        text_N = torch.zeros(self._shape.sequences, dtype=torch.int64)
        for number, batch in enumerate(batches):
            tokens_BS = batch["tokens"]
            first = (number * dp.size() + dp.rank()) * len(tokens_BS)
            for place, tokens_S in enumerate(tokens_BS.numpy(), start=first):
                text_N[place] = crc_of(tokens_S)
        return text_N

    def _checked(self, step: TraceStep) -> TraceStep:
        """Raise InputError if this rank's sequences of the step have another text or no experts."""
        text_N = self._text_N.numpy()
        ours_N = np.flatnonzero(text_N)
        others_N = ours_N[step.text_N[ours_N] != text_N[ours_N]]
        if len(others_N):
            raise InputError(
                f"{REPLAY} {self._replay}: sequence {others_N[0] + 1} of iteration "
                f"{self._done + 1} has another text than in this run: use the --data-path, "
                "--split, --seed and --train-iters of the run that was recorded"
            )
        experts_LNSK = step.experts_LNSK[:, ours_N]
        least = -1 if self._config.selection.choices_per_token is None else 0
        if experts_LNSK.min() < least or experts_LNSK.max() >= self._shape.num_experts:
            raise InputError(
                f"{REPLAY} {self._replay}: tokens of iteration {self._done + 1} have choices "
                f"that --expert-selection {self._config.selection.system} cannot make: record a "
                "run of the same system"
            )
        return step


def run_trace(config: Config, groups: Groups) -> RunTrace | None:
    """The trace and the replay that a configuration asks for. None: neither."""
    selection = config.selection
    if config.moe.num_experts is None:
        return None
    if selection.trace_folder is None and selection.replay_folder is None:
        return None
    return RunTrace(config, selection, groups)


def _greatest(x: torch.Tensor) -> torch.Tensor:
    """On rank 0: the greatest of all ranks' values. Each value is not 0 on some ranks only."""
    dist.reduce(x, 0, dist.ReduceOp.MAX)
    return x
