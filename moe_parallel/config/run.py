"""What a run reads, what it saves and from where it continues, and what it measures and logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.message import flag, shown
from moe_parallel.config.option import Section, number, option
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config

EMBEDDED_VOCAB_SIZE = 4096  # of the embedded corpus, without --vocab-size
_PART_AT_MOST = 1_000_000


@dataclass(frozen=True)
class DataConfig(Section):
    """What the model reads. Without --data-path: the text of the Python installation."""

    data_path: tuple[str, ...] | None = option(
        None,
        "indexed datasets (prefix of .bin/.idx) in Megatron's blend syntax: one prefix, or "
        "weight prefix weight prefix ...; none: the embedded corpus, the text of the Python "
        "installation",
    )
    split: str = option(
        "969,30,1",
        "proportions of --data-path for training, validation and test; their documents are drawn "
        "with a fixed seed, the same in every run",
    )
    tokenizer_type: str = option(
        "ByteLevelBPE", "ByteLevelBPE, HuggingFaceTokenizer or SentencePieceTokenizer"
    )
    tokenizer_model: str | None = option(
        None, "file, folder or hub name of the tokenizer; none: train one on the embedded corpus"
    )
    vocab_size: int | None = option(
        None,
        "vocabulary size; none: the tokenizer's (4096 for the embedded corpus)",
        least=1,
    )
    data_cache_path: str = option(
        "runs/corpus", "folder in which the embedded corpus and the dataset indices are built once"
    )

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        _check_split(self.split)


def _check_split(split: str) -> None:
    parts = [number(part.strip()) for part in split.split(",")]
    valid = all(part is not None and 0 <= part <= _PART_AT_MOST for part in parts)
    if not (valid and len(parts) <= 3 and parts[0]):
        raise InputError(
            f"--split is {shown(split)}: it takes up to three parts such as 969,30,1, none of them "
            "negative and the first above 0"
        )


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """What is written, and from where training continues."""

    save: str | None = option(
        None, "run folder for checkpoints, metrics and the figure; none: write nothing"
    )
    load: str | None = option(
        None,
        "run folder, or one of its iter_* folders, from which to continue. Without --config, "
        "the saved configuration is used, and --save defaults to the same folder. If --save "
        "names the same folder and it has no checkpoint yet, a new run starts",
    )
    finetune: bool = option(
        False,
        "load only the weights from --load; iteration, data position, optimizer state, "
        "schedule and random states start anew, as a new run in another --save",
    )
    override_opt_param_scheduler: bool = option(
        False,
        "continue from --load with the schedule given here (learning rates, warm-up, decay, "
        "weight decay). Without this flag, a schedule that differs from the saved one is "
        "refused",
    )
    override_data: bool = option(
        False,
        "continue from --load with the first sample of the data given here (--data-path, --split, "
        "--seed, --seq-length). Without this flag, data that differ from the saved ones are "
        "refused",
    )
    save_interval: int | None = option(
        None, "iterations between checkpoints; none: only at the end and on a signal", least=1
    )
    async_save: bool = option(
        False,
        "write periodic checkpoints during training, from a copy of the state in host memory. The "
        "last checkpoint, and that on a signal, are written as without this flag. If the host "
        "lacks memory for the copy, a warning says so and training waits for the checkpoint",
    )
    keep_last: int | None = option(None, "number of newest checkpoints to keep; none: all", least=1)

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if self.keep_last is not None and self.save is None:
            raise InputError("--keep-last limits the checkpoints of a run: also set --save")
        if self.save_interval is not None and self.save is None:
            raise InputError("--save-interval needs a folder to save in: set --save too")
        if self.async_save and self.save is None:
            raise InputError("--async-save needs a folder to save in: set --save too")
        for name in ("finetune", "override_opt_param_scheduler", "override_data"):
            if getattr(self, name) and self.load is None:
                raise InputError(f"{flag(name)} needs a checkpoint: set --load")
        if self.finetune and config.moe.moe_dense_warmup_percent:
            raise InputError(
                "--finetune starts from the weights of --load as they are, and "
                "--moe-dense-warmup-percent converts them to experts: remove one of them"
            )


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
