"""What a run writes, and where it goes on from."""

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
    """What is written, and from where training goes on."""

    save: str | None = option(
        None, "folder of the run: checkpoints, metrics, figure; none: nothing is written"
    )
    load: str | None = option(
        None,
        "folder of a run, or one of its iter_* folders, to go on from. Without --config its own "
        "configuration is the file; then --save is its folder unless given. Where --save names the "
        "same folder and no checkpoint is there yet, the run begins",
    )
    finetune: bool = option(
        False,
        "--load gives the weights alone: iteration, data, optimizer state, schedule and random "
        "states start anew, as a run of their own in another --save",
    )
    override_opt_param_scheduler: bool = option(
        False,
        "go on from --load with the schedule configured here (learning rates, warm-up, decay, "
        "weight decay) in place of the one that it was saved with, which is refused otherwise",
    )
    save_interval: int | None = option(
        None, "iterations between checkpoints; none: at the end and on a signal only", least=1
    )
    keep_last: int | None = option(None, "checkpoints to keep, the newest; none: all", least=1)

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if self.keep_last is not None and self.save is None:
            raise InputError("--keep-last bounds the checkpoints of a run: set --save too")
        if self.save_interval is not None and self.save is None:
            raise InputError("--save-interval needs a folder to save in: set --save too")
        for name in ("finetune", "override_opt_param_scheduler"):
            if getattr(self, name) and self.load is None:
                raise InputError(f"{flag(name)} starts from a checkpoint: name one by --load")
        for name in ("moe_use_upcycling", "moe_dense_warmup_percent"):
            if self.finetune and getattr(config.moe, name):
                raise InputError(
                    "--finetune starts from the weights of --load as they are, and "
                    f"{flag(name)} makes experts of them: leave one of them out"
                )
