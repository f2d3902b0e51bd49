"""The contenders of a study: configurations that share a file and differ in expert selection.

The file contains flags, like any configuration. An option that only some systems have applies to
the contenders that have it, so one file may contain `lory-segment-length: 64` and
`moe-router-topk: 2`. A key `NAME:flag` applies only to the contender NAME. The section `study`, if
there is one, is the design of the study (design.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_parallel.config import CheckpointConfig, DataConfig, LoggingConfig
from moe_parallel.config.command_line import expert_options, foreign_options
from moe_parallel.config.config import (
    EXPERT_SELECTION,
    Config,
    common_options,
    make_config,
    selection_options,
)
from moe_parallel.config.message import as_typed, flag
from moe_parallel.config.option import options
from moe_parallel.errors import InputError

DENSE = "dense"
SYSTEMS = (*selection_options(), DENSE)

#: The options that decide which tokens are read and which are held out. All contenders share them.
SHARED_BY_ALL = frozenset(
    {"seq_length", "global_batch_size", "train_iters", "seed"}
    | {o.name for kind in (DataConfig, CheckpointConfig, LoggingConfig) for o in options(kind)}
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")  # names a folder
_SET_BY_THE_STUDY = ("expert_selection", "save")
_CANNOT_BE_SET = (
    "load", "finetune", "override_opt_param_scheduler", "override_data", "exit_interval",
    "exit_duration_in_mins",
)  # fmt: skip

Options = dict[str, Any]  # raw values by option name; other options keep their defaults


@dataclass(frozen=True)
class Contender:
    """One line of the comparison.

    `system`: a value of --expert-selection, or "dense". `options`: all options of its runs.
    `alone`: the options that only it has.
    """

    name: str
    system: str
    options: Options
    alone: Options

    @property
    def config(self) -> Config:
        return make_config(self.options)

    def with_options(self, options: Options) -> Contender:
        """The contender with further options of its own."""
        return replace(self, options=self.options | options, alone=self.alone | options)


@dataclass(frozen=True)
class SharedFile:
    """The content of --config: options that all contenders share, and options of one contender."""

    shared: Options
    alone: dict[str, Options]

    @classmethod
    def from_raw(cls, raw: Mapping[str, Any]) -> SharedFile:
        """`raw`: the result of `read_yaml`. Raises InputError for options that a study refuses."""
        shared: Options = {}
        alone: dict[str, Options] = {}
        for key, value in raw.items():
            contender, colon, option = key.rpartition(":")
            if colon:
                _check_alone(contender, option)
                alone.setdefault(contender, {})[option] = value
            elif key in _CANNOT_BE_SET:
                raise InputError(f"--config sets {flag(key)}: a study trains whole runs from "
                                 "their first step; remove the line")  # fmt: skip
            elif key not in _SET_BY_THE_STUDY:
                shared[key] = value
        return cls(shared, alone)

    def contender(self, name: str, system: str) -> Contender:
        """The contender with these options. Raises InputError, which names the contender, for
        options that it cannot have."""
        alone = self.alone.get(name, {})
        foreign = expert_options() if system == DENSE else foreign_options(system)
        own = {option: value for option, value in self.shared.items() if option not in foreign}
        try:
            if system != DENSE:
                own["expert_selection"] = system
                if self.shared.get("num_experts") in (None, "none"):
                    raise InputError("--num-experts is not set: give the experts to be chosen")
            elif "ffn_hidden_size" not in alone:
                own["ffn_hidden_size"] = _active_width(self.shared)
            make_config(own | alone)
        except InputError as error:
            raise InputError(f"contender {name}: {error}") from None
        return Contender(name, system, own | alone, alone)


def choose_contenders(
    words: Sequence[str],
    file: SharedFile,
    of_design: Sequence[str] = (),
) -> list[Contender]:
    """The contenders that --selections names: a system, or NAME=SYSTEM for a variant of one.

    The file may also have lines for those that its design names (`of_design`).
    """
    chosen: dict[str, Contender] = {}
    for word in words:
        name, _, system = word.partition("=")
        system = system or name
        if system not in SYSTEMS:
            raise InputError(
                f"--selections names {as_typed(word)}: choose from {', '.join(SYSTEMS)}, or "
                "NAME=SYSTEM for a variant of one"
            )
        if not _NAME.fullmatch(name):
            raise InputError(
                f"--selections names {as_typed(word)}: a name has up to 40 letters, digits, _ . -"
            )
        if name in chosen:
            raise InputError(
                f"--selections names {name} twice: a variant needs a name of its own "
                f"({name}2={system})"
            )
        chosen[name] = file.contender(name, system)
    others = {word.partition("=")[0] for word in of_design}
    for name in file.alone.keys() - chosen.keys() - others - set(SYSTEMS):
        raise InputError(f"--config has a line for {as_typed(name)}, which is not a contender")
    return list(chosen.values())


def _check_alone(contender: str, option: str) -> None:
    if option in SHARED_BY_ALL or option in (*_CANNOT_BE_SET, EXPERT_SELECTION):
        raise InputError(
            f"{flag(option)} cannot be set for {as_typed(contender)} alone: all contenders read "
            "the same tokens and are judged on the same text"
        )


def _active_width(shared: Options) -> int:
    """The width of a dense model: that of K experts, plus that of the shared expert if any."""
    known = {name: o for its in selection_options().values() for name, o in its.items()}
    known |= common_options()

    def value(name: str) -> Any:
        each = known[name]
        return each.parse(shared[name]) if name in shared else each.default

    if value("moe_layer_freq") != "1":
        raise InputError(
            f"with --moe-layer-freq {value('moe_layer_freq')} no single width is that of the "
            "experts that a token uses: set one in --config, as dense:ffn-hidden-size: N"
        )
    width = value("moe_ffn_hidden_size") or value("ffn_hidden_size")
    shared_width = value("moe_shared_expert_intermediate_size") or 0
    return int(value("moe_router_topk") * width + shared_width)
