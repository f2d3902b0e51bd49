"""The training loop of one stage: steps, logging, evaluations, checkpoints, and its time limit."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from moe_parallel.collective_errors import exchange
from moe_parallel.config import Config
from moe_parallel.copies import copied_to
from moe_parallel.data.datasets import Datasets
from moe_parallel.data.sampler import batches
from moe_parallel.errors import InputError
from moe_parallel.evaluation.text_loss import TextLoss, measure_text_loss
from moe_parallel.model.forward import Batch
from moe_parallel.platform.device import peak_memory
from moe_parallel.telemetry.progress import Phase
from moe_parallel.telemetry.sinks import Telemetry
from moe_parallel.telemetry.statistics import RoutingStatistics, RoutingTotals, rank_load
from moe_parallel.training.checkpoint.checkpointer import TrainingState
from moe_parallel.training.checkpoint.folder import checkpoint_name
from moe_parallel.training.checkpoint.saving import NoMemory, NotSaved, last_good
from moe_parallel.training.engine import NonFinite, StepResult
from moe_parallel.training.failure import STARTED, Diverged
from moe_parallel.training.instruments import GatheredTimes, Instruments, Profile
from moe_parallel.training.signals import EXIT_INTERRUPTED, StopRequest
from moe_parallel.training.stages import Stage
from moe_parallel.training.text import Text


class Loop:
    """Runs steps, evaluations, checkpoints and logging in the order of the configuration."""

    def __init__(
        self,
        config: Config,
        stage: Stage,
        text: Text,
        datasets: Datasets,
        telemetry: Telemetry,
        instruments: Instruments,
        began: float,
        stop: StopRequest,
    ) -> None:
        """`began`: time.monotonic() at the time when this process began to train."""
        self.config = config
        self.stage = stage
        self.engine = stage.engine
        self.datasets = datasets
        self.state = stage.state
        self.telemetry = telemetry
        self.instruments = instruments
        self.interval = Interval(stage.engine.statistics, stage.state.unlogged)
        self.progress = stage.engine.progress
        self.times = GatheredTimes(self.progress, stage.engine.groups.pp.rank())
        self.asked_to_leave = False  # by a signal, --exit-interval or --exit-duration-in-mins
        self.bytes_per_token_V = text.bytes_per_token(stage.engine.device)
        self.profile = Profile(config, dist.get_rank())
        self.saves = Saves(stage, telemetry, has_folder=config.checkpoint.save is not None)
        self._save_seconds = 0.0  # since the last log line
        self._began = began
        self._stop = stop
        self._deadline = Deadline(config.training.exit_duration_in_mins)

    def train(self) -> int:
        """Train to the end of the stage or until asked to stop; returns the exit code. Collective.

        Raises:
            Diverged: the loss or the gradient norm is no longer finite.
        """
        self._say_if(self.stage.note)
        stream = self._stream()
        with self._stop.finishing(self.whereabouts) as stop:
            while self.state.iteration < self.stage.until:
                result = self._step(stream)
                if self.state.iteration == 1:
                    self._tell_start()
                # The checkpoint comes last, so that every record up to it is in the log.
                self._log(result)
                if self._due(self.config.logging.eval_interval) and not self.done:
                    self.evaluate()
                stopping, late = self._agreed(stop)
                leaving = self._due(self.config.training.exit_interval)
                self.asked_to_leave = stopping or late or leaving
                if self.asked_to_leave:
                    self._say_if(self.profile.finish())
                if self._due(self.config.checkpoint.save_interval) or self.asked_to_leave:
                    self.save(can_wait=not self.asked_to_leave)
                if stopping:
                    self.telemetry.say(f"stopped by a signal {self.whereabouts()}")
                    return EXIT_INTERRUPTED
                if late:
                    limit = self.config.training.exit_duration_in_mins
                    self.telemetry.say(f"--exit-duration-in-mins {limit}: {self.whereabouts()}")
                    return EXIT_INTERRUPTED
                if leaving:
                    self.telemetry.say(f"--exit-interval: left at {self.state.iteration}")
                    return 0
            self.save()
        stop.heed()
        return 0

    @property
    def done(self) -> bool:
        """Whether this was the run's last iteration."""
        return self.state.iteration >= self.config.training.train_iters

    def save(self, *, can_wait: bool = False) -> None:
        """Write a checkpoint of the current state, unless it exists already. Collective.

        With `can_wait`, a failed write does not end the run: a later checkpoint may succeed. With
        --async-save it is then written during training.
        """
        if self.config.checkpoint.save is None:
            return
        can_wait = can_wait and self.state.iteration < self.stage.until
        begin = time.monotonic()
        with self.progress.activity(Phase.SAVE):
            self.saves.save(replace(self.state, unlogged=self.interval.state()), can_wait=can_wait)
        self._save_seconds += time.monotonic() - begin

    def evaluate(self, *, everything: bool = False) -> dict[str, TextLoss]:
        """Evaluate on each domain's validation text; log and return the results. Collective.

        `everything` evaluates all of the text; otherwise --eval-iters global batches are
        evaluated. Returns {} if --eval-iters is 0 or --split leaves no validation text.
        """
        training, logging = self.config.training, self.config.logging
        if not (everything or logging.eval_iters):
            return {}
        samples = None if everything else logging.eval_iters * training.global_batch_size
        texts: dict[str, TextLoss] = {}
        readings: dict[str, dict[str, Any]] = {}
        for domain, dataset in self.datasets.valid.items():
            with (
                self.progress.activity(Phase.EVALUATE),
                self.engine.statistics.evaluating() as routing,
            ):
                text = measure_text_loss(
                    self.engine.chunks,
                    dataset,
                    self.bytes_per_token_V,
                    training,
                    self.engine.groups,
                    samples,
                    self.config.first_part,
                    self.engine.statistics,
                )
            texts[domain] = text
            readings[domain] = {
                "loss": text.loss,
                "bits_per_byte": text.bits_per_byte,
                "layers": routing.reduced([None]).summaries(),
            }
            if text.later is not None:
                readings[domain]["loss_after_first_part"] = text.later.loss
        if not all(math.isfinite(text.loss) for text in texts.values()):
            raise self._diverged("the loss on validation text is not finite", self.state.iteration)
        self.saves.confirm(self.state.iteration)
        if readings:
            self.telemetry.log(self.place() | {"validation": readings})
        return texts

    def _stream(self) -> Iterator[Batch]:
        dp = self.engine.groups.dp
        stream = batches(
            self.datasets.train,
            consumed_samples=self.state.consumed_samples - self.datasets.first,
            micro_batch_size=self.config.training.micro_batch_size,
            data_parallel_rank=dp.rank(),
            data_parallel_size=dp.size(),
        )
        return self.progress.through(Phase.DATA, stream)

    def _step(self, stream: Iterator[Batch]) -> StepResult:
        self.profile.begin_step(self.state.iteration + 1)
        begin = time.monotonic()
        self.progress.begin_step(self.state.iteration + 1)
        try:
            result = self.engine.step(stream)
        except NonFinite as error:
            raise self._diverged(str(error), self.state.iteration + 1) from error
        self.progress.end_step()
        self.saves.confirm(self.state.iteration)
        self.interval.add(result, time.monotonic() - begin)
        self.state = TrainingState(
            iteration=self.state.iteration + 1,
            consumed_samples=self.state.consumed_samples + self.config.training.global_batch_size,
            consumed_tokens=self.state.consumed_tokens + result.tokens,
        )
        iteration = self.state.iteration
        self._say_if(self.profile.end_step(iteration, is_last=iteration == self.stage.until))
        return result

    def _say_if(self, text: str | None) -> None:
        if text is not None:
            self.telemetry.say(text)

    def _tell_start(self) -> None:
        """Say how large the outputs of the layers of experts are at the start."""
        sizes = [layer["output_rms"] for layer in self.interval.layers()]
        if sizes:
            self.telemetry.say(
                f"RMS of the MoE layers' outputs at the start: {sum(sizes) / len(sizes):.3g} "
                f"({min(sizes):.3g} to {max(sizes):.3g})"
            )

    def _log(self, result: StepResult) -> None:
        """Log the iterations since the last line if a line is due or the stage ends. Collective."""
        if not self._due(self.config.logging.log_interval) and (
            self.state.iteration < self.stage.until
        ):
            self.telemetry.advance(self.state.iteration)
            return
        averages, layers = self.interval.averages(), self.interval.layers()
        load = rank_load(layers, self.engine.groups.ep.size())
        times, news = self.times.take()
        controlled = self.engine.controlled()  # what controllers set for the next step
        if controlled:
            chosen = [layer["experts_per_token"] for layer in layers]
            controlled["experts_per_token"] = sum(chosen) / len(chosen)
        peak = torch.tensor(peak_memory(), device=self.engine.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        self.telemetry.log(
            self.place()
            | averages
            | ({} if load is None else {"rank_load": load})
            | controlled
            | {
                "grad_norm": result.grad_norm,
                "learning_rate": result.learning_rate,
                "peak_memory_bytes": int(peak),
                "save_seconds": round(self._save_seconds, 6),
                "ranks": times,
                "machine": self.instruments.record(
                    self.engine.config, averages["tokens_per_second"], layers
                ),
                "layers": layers,
            }
        )
        self._say_if(news)
        self._save_seconds = 0.0
        self.interval.clear()

    def place(self) -> dict[str, Any]:
        """The run's progress, in the fields that every record has."""
        forced = self.config.selection.forced_routing
        return {
            "iteration": self.state.iteration,
            **({} if forced is None else {"forced_routing": forced}),
            "consumed_samples": self.state.consumed_samples,
            "consumed_tokens": self.state.consumed_tokens,
            "elapsed_seconds": round(time.monotonic() - self._began, 3),
        }

    def _due(self, every: int | None) -> bool:
        return every is not None and self.state.iteration % every == 0

    def _agreed(self, stop: StopRequest) -> tuple[bool, bool]:
        """Whether any rank was asked to stop, and whether any is near its deadline. Collective.

        All ranks then stop after the same step. A run that is done needs no more time. In the same
        exchange they learn whether all have written a checkpoint during training.
        """
        late = self._deadline.is_near() and not self.done
        mine = [stop.signal is not None, late, self.saves.is_writing()]
        anywhere = copied_to(self.engine.device, torch.tensor(mine, dtype=torch.int32))
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        stopping, late, writing = anywhere.bool().tolist()
        if not writing:
            self.saves.finish(self.state.iteration)
        return stopping, late

    def whereabouts(self) -> str:
        """The run's progress and how to continue it, for the message of a run that was stopped."""
        folder = self.config.checkpoint.save
        go_on = f"continue with --load {folder}" if folder else "nothing was saved (no --save)"
        return f"after iteration {self.state.iteration}; {go_on}"

    def _diverged(self, what: str, iteration: int) -> Diverged:
        good = "there is no checkpoint (no --save)"
        if self.config.checkpoint.save is not None:
            with self.progress.activity(Phase.SAVE):
                self.saves.finish(self.state.iteration)  # it may be the good one
            good = last_good(self.stage.checkpoints.folder, self.state.iteration)
        return Diverged(f"iteration {iteration}: {what}; {good}")


class Interval:
    """Sums over the iterations since the last log line, and over all ranks.

    A checkpoint between two log lines contains the sums, as `state`. Every step is summed over the
    ranks before it is added. So a run that continues makes the same additions, with the same
    rounding, as a run that was never stopped.
    """

    def __init__(self, statistics: RoutingStatistics, state: Mapping[str, Any] | None) -> None:
        """`state`: of an earlier interval with the same layers and experts; None: start empty.

        Raises:
            InputError: `state` is something else.
        """
        self._statistics = statistics
        self.clear()
        if state is None:
            return
        try:
            self._losses = float(state["losses"])
            self._iterations = int(state["iterations"])
            self._tokens = int(state["tokens"])
            self._seconds = float(state["seconds"])
            self._routing.load_state(state["routing"])
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise InputError(
                "--load: the checkpoint's sums of unlogged iterations have the wrong "
                f"format ({type(error).__name__}); load another checkpoint"
            ) from error

    def clear(self) -> None:
        """Start anew: everything so far has been logged."""
        self._losses, self._iterations, self._tokens, self._seconds = 0.0, 0, 0, 0.0
        self._statistics.training.clear()
        self._routing = RoutingTotals.zeros_like(self._statistics.training)

    def add(self, result: StepResult, seconds: float) -> None:
        """Add one iteration and its routing statistics. Collective."""
        self._losses += result.lm_loss
        self._iterations += 1
        self._tokens += result.tokens
        self._seconds += seconds
        self._routing.add_totals(self._statistics.training.reduced([None]))
        self._statistics.training.clear()

    def averages(self) -> dict[str, float]:
        """The averages over at least one iteration; the loss is in nats per token."""
        return {
            "lm_loss": self._losses / self._iterations,
            "tokens_per_second": self._tokens / self._seconds,
        }

    def layers(self) -> list[dict[str, Any]]:
        """The routing statistics of each layer: `RoutingTotals.summaries`."""
        return self._routing.summaries()

    def state(self) -> dict[str, Any] | None:
        """The sums in JSON's types, the same on every rank; None if there are none."""
        if not self._iterations:
            return None
        return {
            "losses": self._losses,
            "iterations": self._iterations,
            "tokens": self._tokens,
            "seconds": self._seconds,
            "routing": self._routing.state(),
        }


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


class Deadline:
    """Counts the minutes since the start of the job, also for ranks that were started anew in it.

    So the limit is that of a batch job.
    """

    def __init__(self, minutes: float | None) -> None:
        """`minutes`: None: there is no limit."""
        self._last = time.monotonic()
        self._longest = 0.0
        self._end = None if minutes is None else self._last - _age() + 60 * minutes

    def is_near(self) -> bool:
        """Whether the limit would pass before the next call, which comes one step later.

        The time to the next call is taken to be the longest between two calls so far, which
        includes evaluations and checkpoints that training waited for.
        """
        if self._end is None:
            return False
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        return now + self._longest > self._end


def _age() -> float:
    """Seconds since the job began, as its launcher or job script says, or else this process."""
    began = os.environ.get(STARTED) or psutil.Process().create_time()
    return max(0.0, time.time() - float(began))
