"""checkpoint.json, a checkpoint's record of the run that saved it, beside a configuration."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint_folder import read_record

FORMAT = 1

# A run that goes on keeps its schedule; another one would change the learning rate unnoticed.
SCHEDULE_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "--lr-warmup-iters",
    "lr_decay_steps": "--lr-decay-iters (or --train-iters)",
    "lr_decay_style": "--lr-decay-style",
    "end_wd": "--weight-decay",
}


@dataclass(frozen=True)
class Expected:
    """What a checkpoint has to be like."""

    fingerprint: Mapping[str, object]  # facts that it must have
    same_schedule: bool = True  # whether its schedule must be the one configured
    remedy: str = "use the values of its config.yaml, or load another checkpoint"


def checked_record(
    checkpoint: Path,
    expected: Expected,
    optimizer: object | None,
    scheduler: OptimizerParamScheduler | None,
) -> dict[str, Any]:
    """The record of a checkpoint that is as expected; raises InputError, which says what differs.

    `optimizer`, `scheduler`: what will need a state; None: nothing.
    """
    record = read_record(checkpoint)
    if record["format"] != FORMAT:
        raise InputError(
            f"--load {checkpoint}: its format is {record['format']}, and this program reads "
            f"{FORMAT}; load it with the version that wrote it"
        )
    _compare(checkpoint, record["fingerprint"], as_json(expected.fingerprint), expected.remedy)
    for part, key, wanted in (
        ("optimizer", "adam_step", optimizer),
        ("scheduler", "scheduler", scheduler),
    ):
        if wanted is not None and record[key] is None:
            raise InputError(
                f"--load {checkpoint}: it has weights, but no state of the {part} to go on "
                "training with; load one that training has saved"
            )
    if scheduler is not None and expected.same_schedule:
        configured = _schedule(scheduler.state_dict())
        _compare(checkpoint, _schedule(record["scheduler"]), configured, Expected.remedy)
    return record


def as_json(facts: Mapping[str, object]) -> dict[str, object]:
    """As JSON returns them, so that a tuple equals the list that it was saved as."""
    return dict(json.loads(json.dumps(dict(facts))))


def _compare(
    checkpoint: Path,
    stored: Mapping[str, object],
    configured: Mapping[str, object],
    remedy: str,
) -> None:
    """Raises InputError that lists every value that differs.

    A checkpoint may be older than an option and not name it; its tensors are compared later anyway.
    """
    differing = [
        f"{name} is {stored[name]} in the checkpoint and {value} here"
        for name, value in configured.items()
        if name in stored and stored[name] != value
    ]
    if differing:
        raise InputError(f"--load {checkpoint}: {', '.join(differing)}; {remedy}")


def _schedule(state: Mapping[str, object]) -> dict[str, object]:
    """What a scheduler was configured with, by flag."""
    return {flag: state[key] for key, flag in SCHEDULE_FLAGS.items()}
