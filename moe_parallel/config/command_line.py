"""The command line, generated from the configuration's dataclasses."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_parallel.config.config import (
    Config,
    common_sections,
    expert_selection,
    make_config,
    selection_options,
)
from moe_parallel.config.message import as_typed
from moe_parallel.config.one_line_parser import OneLineParser, dashed, help_of_terminal_width
from moe_parallel.config.option import Option, options
from moe_parallel.config.replaced import without_replaced
from moe_parallel.config.selection import SELECTIONS
from moe_parallel.config.yaml_file import read_yaml
from moe_parallel.errors import InputError

_METAVAR_END = 78  # argparse does not break such a word


@dataclass(frozen=True)
class CommandLine:
    """The options that were given on the command line."""

    given: Mapping[str, Any]  # raw values by option name
    file: Path | None  # of --config

    def over(self, file: Mapping[str, Any], name: str) -> tuple[Config, list[str]]:
        """The configuration of these options over those of a file, and warnings.

        Args:
            file: raw values by option name.
            name: the name of the file in messages.

        Raises InputError for anything wrong.
        """
        kept, replaced = without_replaced(file, self.given)
        warnings = [] if replaced is None else [f"{replaced}, which {name} has"]
        return make_config(kept | dict(self.given)), warnings


def read_command_line(arguments: Sequence[str]) -> CommandLine:
    """Splits `[--config FILE.yaml] [--flag value ...]` into options.

    Prints help and raises SystemExit(0) for --help. Raises InputError for unknown words.
    """
    parser = _parser()
    words = [word.split("=")[0] for word in arguments if word.startswith("--")]
    flags = [dashed(word) for word in words]
    for word, its_flag in zip(words, flags, strict=True):
        if its_flag not in parser.flags:
            near = difflib.get_close_matches(its_flag.lower(), parser.flags, n=1)
            hint = f"did you mean {near[0]}?" if near else "--help lists all flags"
            raise InputError(f"{as_typed(word)} is not a flag of this program: {hint}")
    if flags.count("--config") > 1:
        raise InputError("--config is given twice: name one file, and change it by flags")
    given = vars(parser.parse_args(arguments))
    file = given.pop("config", None)
    return CommandLine(given, None if file is None else Path(file))


def parse_command_line(arguments: Sequence[str]) -> Config:
    """The configuration of `[--config FILE.yaml] [--flag value ...]`; flags override the file.

    If a flag replaces the file's system of expert selection, the options of that system are left
    out.
    Prints help and raises SystemExit(0) for --help. Raises InputError for anything wrong.
    """
    line = read_command_line(arguments)
    file = {} if line.file is None else read_yaml(line.file)
    config, _ = line.over(file, f"--config {line.file}")
    return config


class _Parser(OneLineParser):
    """Prints --help and splits the command line into words."""

    @property
    def flags(self) -> list[str]:
        return list(self._option_string_actions)


def _parser() -> _Parser:
    parser = _Parser(
        prog="pretrain_gpt_moe.py",
        usage="python pretrain_gpt_moe.py [--nproc-per-node N] [--config FILE.yaml]\n"
        "                              [--flag value ...]",
        description="Pretrain a mixture-of-experts language model. --expert-selection names the "
        "system that selects the experts. Every YAML key is also a flag; flags override the file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=help_of_terminal_width,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="read options from this file")
    for name, section in common_sections().items():
        group = parser.add_argument_group(name, _first_line(section))
        for each in options(section):
            _add(group, each, f"{each.help} (default: {_text(each.default)})")
        if name == "moe":
            _add_selections(parser)
    return parser


def _add_selections(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "expert selection", "Brackets name the systems that have an option."
    )
    which = expert_selection()
    _add(group, which, f"{which.help} (default: {which.default})")
    owners: dict[str, dict[str, Option]] = {}
    for system, its_options in selection_options().items():
        for name, each in its_options.items():
            owners.setdefault(name, {})[system] = each
    for systems in owners.values():
        first, *_ = systems.values()
        text = f"[{_named(systems)}] {first.help} (default: {_defaults(systems)})"
        _add(group, first, text)


def _named(systems: Collection[str]) -> str:
    """The systems that have an option, or those that do not if they are fewer."""
    others = [system for system in SELECTIONS if system not in systems]
    if not others:
        return "all"
    return f"all but {', '.join(others)}" if len(others) < len(systems) else ", ".join(systems)


def _defaults(systems: dict[str, Option]) -> str:
    """The defaults of an option that several systems have, such as `0.4; aoe_top_p: 0.6`."""
    usual, *_ = (_text(each.default) for each in systems.values())
    others = [
        f"{system}: {_text(each.default)}"
        for system, each in systems.items()
        if _text(each.default) != usual
    ]
    return "; ".join([usual, *others])


def _add(group: Any, each: Option, text: str) -> None:
    text = text.replace("%", "%%")
    if each.kind is bool:
        group.add_argument(each.flag, help=text, nargs="?", const="true", metavar="true|false")
    elif each.many:
        group.add_argument(each.flag, help=text, nargs="+", metavar="WORD")
    else:
        metavar = "|".join(each.choices) or {int: "N", float: "X", str: "TEXT"}[each.kind]
        if len(f"  {each.flag} {metavar}") > _METAVAR_END:
            text, metavar = f"{', '.join(each.choices)}: {text}", "WORD"
        group.add_argument(each.flag, help=text, metavar=metavar)


def _text(default: Any) -> str:
    if isinstance(default, bool) or default is None:
        return str(default).lower()
    return str(default)


def _first_line(section: type) -> str:
    return (section.__doc__ or "").split("\n\n")[0].replace("\n    ", " ")
