"""The check of all rules between options, once, before anything is built or written."""

from __future__ import annotations

from moe_parallel.config.config import Config
from moe_parallel.config.option import options

#: The order matters: a later section may rely on the checks of an earlier one.
_ORDER = ("fp8", "parallel", "training", "optimizer", "checkpoint", "data", "logging")


def validate(config: Config, world_size: int) -> None:
    """Raise InputError for the first rule that `config` on `world_size` ranks breaks."""
    _check_bounds(config)
    config.model.check(config, world_size)
    _check_experts(config, world_size)
    for section in _ORDER:
        getattr(config, section).check(config, world_size)


def validate_layer(config: Config) -> None:
    """Raise InputError for the first rule that `config` breaks for one layer of experts.

    Only single values and the rules on experts are checked, not those on the rest of the model.
    """
    _check_bounds(config)
    _check_experts(config, 1)


def _check_bounds(config: Config) -> None:
    for _, section in config.sections():
        for option in options(type(section)):
            option.check(getattr(section, option.name))


def _check_experts(config: Config, world_size: int) -> None:
    config.moe.check(config, world_size)
    if config.moe.num_experts is not None:
        config.selection.check(config, world_size)
