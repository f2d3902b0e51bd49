"""The configuration of a converted model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_parallel.config import Config, Selection, read_command_line
from moe_parallel.config.message import flag
from moe_parallel.config.option import options
from moe_parallel.errors import InputError
from moe_parallel.systems import SELECTIONS, LoryPrefixSelection, LorySelection, TopKSelection

SOURCES: dict[str, tuple[type[Selection], ...]] = {
    "aoe": (TopKSelection,),
    # For a top-k model this is a new start: fresh optimizer state, another schedule.
    "topk": (TopKSelection, LorySelection, LoryPrefixSelection),
}
#: Options that are converted to another option, --aoe-gate.
COUNTERPARTS = {"moe_router_pre_softmax"}
#: Options that are refused although both systems have them: their scores are not converted.
NOT_CONVERTED = {
    "moe_router_enable_expert_bias",
    "moe_zero_experts",
    "moe_copy_experts",
    "moe_constant_experts",
}


def converted_config(source: Config, to: str, save: str, flags: Sequence[str]) -> Config:
    """The configuration of `source` with another system of expert selection, changed by flags.

    Options that both systems have keep their values, except the files of a trace. Raises
    InputError if the model cannot be converted, or if the flags change its sizes.
    """
    _check_source(source, to)
    values: dict[str, Any] = {}
    for section, of_section in source.values():
        if section not in ("selection", "checkpoint"):
            values |= of_section
    values |= {"expert_selection": to, "save": save}
    of_run = {"moe_router_trace", "moe_router_replay"}  # files of the run of --load
    known = {each.name for each in options(SELECTIONS[to])} - of_run
    for each in options(type(source.selection)):
        if each.name in known:
            values[each.name] = getattr(source.selection, each.name)
    if to == "aoe":
        # W_p and W_o stay as they are.
        values["aoe_wide_size"] = source.expert_width
        # With K = 1 a top-k model does not renormalize: the result would always be 1.
        values["aoe_gate"] = "selected" if source.selection.renormalizes else "all"
    line = read_command_line(flags)
    if line.file is not None:
        raise InputError("--config names a file, but --load has the model: leave it out")
    # In the types that YAML gives.
    raw = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
    config, _ = line.over(raw, "--load")
    _check_unchanged(source, config, to)
    return config


def left_out(source: Config, to: str) -> list[str]:
    """The options that are set but have no counterpart, each as `--flag value`."""
    known = {each.name for each in options(SELECTIONS[to])} | COUNTERPARTS
    given = (
        (each, getattr(source.selection, each.name)) for each in options(type(source.selection))
    )
    return [
        f"{each.flag} {value}"
        for each, value in given
        if each.name not in known and value != each.default
    ]


def _check_source(source: Config, to: str) -> None:
    name = source.selection.system
    wanted = " or ".join(n for n, kind in SELECTIONS.items() if kind in SOURCES[to])
    if source.moe.num_experts is None:
        raise InputError(f"--to {to} takes a model of experts ({wanted}), but --load is dense")
    if type(source.selection) not in SOURCES[to]:
        raise InputError(
            f"--to {to} takes a model of --expert-selection {wanted}, but --load is {name}"
        )
    known = {each.name for each in options(SELECTIONS[to])} - NOT_CONVERTED
    known |= COUNTERPARTS
    for each in options(type(source.selection)):
        value = getattr(source.selection, each.name)
        if each.weights and each.name not in known and value != each.default:
            raise InputError(
                f"--to {to} does not support {each.flag} {value}, which the model of --load has: "
                "convert a model without it"
            )


def _check_unchanged(source: Config, config: Config, to: str) -> None:
    """Check that the flags change only the training, not the model."""
    for name in ("num_experts", "moe_layer_freq", "moe_ffn_hidden_size"):
        old, new = getattr(source.moe, name), getattr(config.moe, name)
        if old != new:
            raise InputError(f"{flag(name)} is {new}, but {old} in --load: leave it out")
    for each in options(type(source.model)):
        old, new = getattr(source.model, each.name), getattr(config.model, each.name)
        if old != new:
            raise InputError(f"{each.flag} is {new}, but {old} in --load: leave it out")
    if config.selection.system != to:
        raise InputError(f"--expert-selection follows from --to {to}: leave it out")
    for each in options(type(config.selection)):
        new = getattr(config.selection, each.name)
        old = getattr(source.selection, each.name, new)
        if each.weights and old != new:
            raise InputError(f"{each.flag} is {new}, but {old} in --load: leave it out")
    if config.expert_width != source.expert_width:
        raise InputError(
            f"--aoe-wide-size is {config.expert_width}, but the experts of --load have a width of "
            f"{source.expert_width}: leave it out"
        )
