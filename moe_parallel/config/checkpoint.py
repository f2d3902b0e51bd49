"""The options of checkpoints: what a run writes, and from where it continues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.message import flag
from moe_parallel.config.option import option
from moe_parallel.config.section import Section
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


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
