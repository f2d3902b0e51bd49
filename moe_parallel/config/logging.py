"""The options for measurements and logs during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.option import option
from moe_parallel.config.section import Section
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class LoggingConfig(Section):
    """What is measured and logged during training."""

    log_interval: int = option(10, "iterations between log lines", least=1)
    eval_interval: int | None = option(
        None, "iterations between evaluations; none: only at the end", least=1
    )
    eval_iters: int = option(
        10,
        "global batches per domain in one evaluation; 0: no evaluation except --full-evaluation",
        least=0,
    )
    eval_first_part: int | None = option(
        None,
        "N: in evaluation, also report the loss after the first N tokens of each sequence; "
        "none: after the first segment, for systems that route segments",
        least=1,
    )
    full_evaluation: bool = option(
        False, "at the end, evaluate every held-out token and compare with byte models and xz"
    )
    log_digest: int | None = option(
        None,
        "N: every N iterations, log a digest of the weights and of the optimizer's state, which "
        "is equal for equal states and the same in every layout; none: off",
        least=1,
    )
    machine_sample_seconds: float | None = option(
        5.0,
        "seconds between two readings of the GPU and the host by a thread in the background "
        "(use, memory, clocks, power); none: off",
        above=0,
    )
    peak_tflops: float | None = option(
        None,
        "peak TFLOP/s of one device, for MFU; none: that of known GPUs in bf16",
        above=0,
    )
    profile: bool = option(
        False,
        "record --profile-step-start to --profile-step-end with torch's profiler, and write traces "
        "and tables to SAVE/profile",
    )
    profile_step_start: int = option(10, "first iteration that --profile records", least=1)
    profile_step_end: int = option(
        12,
        "first iteration that --profile no longer records; the memory of a profile grows with each",
        least=2,
    )
    profile_ranks: tuple[int, ...] = option((0,), "ranks that --profile records", least=0)
    tensorboard: bool = option(True, "write TensorBoard event files under --save")
    wandb_project: str | None = option(
        None, "log to this Weights & Biases project (pip install wandb); none: off"
    )
    wandb_mode: str = option("offline", "mode of Weights & Biases", choices=("offline", "online"))

    @property
    def evaluates_at_the_end(self) -> bool:
        return self.full_evaluation or self.eval_iters > 0

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        first, length = self.eval_first_part, config.training.seq_length
        if first is not None and first >= length:
            raise InputError(
                f"--eval-first-part is {first}, which leaves nothing of --seq-length {length}: "
                f"choose at most {length - 1}"
            )
        if self.profile:
            self._check_profile(config, world_size)

    def _check_profile(self, config: Config, world_size: int) -> None:
        start, end = self.profile_step_start, self.profile_step_end
        if config.checkpoint.save is None:
            raise InputError("--profile needs a folder to write to: set --save")
        if not start < end:
            raise InputError(
                f"--profile-step-end is {end}: it must be greater than --profile-step-start, which "
                f"is {start}"
            )
        if start > config.training.train_iters:
            raise InputError(
                f"--profile-step-start is {start}, after the last of --train-iters "
                f"{config.training.train_iters}: choose an earlier one"
            )
        absent = [rank for rank in self.profile_ranks if rank >= world_size]
        if absent:
            raise InputError(
                f"--profile-ranks has {absent[0]}, but the ranks are 0 to {world_size - 1}"
            )
