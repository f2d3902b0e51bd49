"""The mean number of experts per token of a plan: fixed, a target of training, or measured.

In `mean_choices` a user gives the number that a run measured. None: the configuration says it.
"""

from __future__ import annotations

from moe_parallel.config import Config
from moe_parallel.errors import InputError
from moe_parallel.plan.shape import target_of


def check_mean_choices(config: Config, mean_choices: float | None) -> None:
    """Raise InputError for a number that the configuration fixes, or that is out of range."""
    if mean_choices is None:
        return
    dense = config.moe.num_experts is None
    if dense or (config.selection.mean_choices is not None and target_of(config) is None):
        raise InputError(
            f"--mean-choices is {mean_choices}, but the configuration says how many experts a "
            "token has: leave it out"
        )
    if not 0 < mean_choices <= config.num_experts:
        raise InputError(
            f"--mean-choices is {mean_choices}: it must be above 0 and at most --num-experts "
            f"{config.num_experts}"
        )


def mean_choices_line(config: Config, mean_choices: float | None) -> str:
    """A line that says for which number the plan is, if training decides the number; else ""."""
    target = target_of(config)
    if target is None:
        return "" if mean_choices is None else f"--mean-choices: {mean_choices:g} a token\n"
    if mean_choices is not None:
        return f"--mean-choices: {mean_choices:g} a token, in place of {target.flags}\n"
    first = f"; {target.at_first}" if target.at_first else ""
    return (
        f"training decides the number of experts per token: the plan is for {target.mean:g}, the "
        f"target of {target.flags}{first} (--mean-choices plans another number)\n"
    )


def mean_choices_source(config: Config, mean_choices: float | None) -> str | None:
    """The flags that say the number. None: it is fixed."""
    if mean_choices is not None:
        return "--mean-choices"
    target = target_of(config)
    return None if target is None else target.flags
