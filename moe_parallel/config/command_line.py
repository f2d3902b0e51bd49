"""The command line and the file of --config, from which a configuration is made."""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from moe_parallel.config.config import (
    EXPERT_SELECTION,
    Config,
    common_sections,
    expert_selection,
    make_config,
    selection_options,
)
from moe_parallel.config.message import as_typed, did_you_mean, flag, shown
from moe_parallel.config.moe import MoEConfig
from moe_parallel.config.option import Option, number, options
from moe_parallel.config.parser import (
    OneLineParser,
    add_launching_flags,
    dashed,
    help_of_terminal_width,
)
from moe_parallel.config.selection import selection_of, selections
from moe_parallel.errors import InputError
from moe_parallel.reading import read_small

_BYTES_MAX, _LEVELS_MAX = 1 << 20, 50  # far above any configuration


class _Loader(yaml.SafeLoader):
    """PyYAML's loader with the numbers of the command line.

    In YAML 1.1 010 is 8, 1:30 is 90 and 1_0 is 10. Here, anything but a decimal number is text.
    PyYAML's loader in C is faster, but a file that is nested too deeply ends the process there.
    An alias (`*name`) may stand for one value. Of lists and maps that hold each other, a few lines
    are endless.
    """

    _level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        alias = self.check_event(yaml.AliasEvent)
        self._level += 1
        if self._level > _LEVELS_MAX:
            raise ValueError("it is nested too deeply")
        node = super().compose_node(parent, index)
        self._level -= 1
        if alias and not isinstance(node, yaml.ScalarNode):
            raise ValueError("an alias stands for a list or a map: write it out")
        return node


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float | str:
    text = str(node.value)
    value = number(text)
    if value is None:
        return _SPECIAL.get(text.lower(), text)
    return value


_SPECIAL: dict[str, int | float | str] = {".inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _number)


def read_yaml(path: Path, flag: str = "--config ") -> dict[str, Any]:
    """The raw values of a YAML file, by option name. Keys are flags without the leading dashes.

    `flag`: begins a message.

    Raises InputError if the file cannot be read, has anything but `key: value` lines, or has a key
    twice.
    """
    name = str(path)
    file = f"{flag}{name if name.isprintable() else shown(name)}"  # the full name, to find it
    text = _read_text(path, file)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        content = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{file} is not valid YAML: {_one_line(error)}") from None
    except (AttributeError, LookupError, TypeError):  # PyYAML, for a wrong tag
        raise InputError(f"{file} is not valid YAML: a value does not fit its !!tag") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not isinstance(node, yaml.MappingNode):
        raise InputError(f"{file} must hold lines of the form `key: value`")
    names = Counter(str(key.value).replace("_", "-") for key, _ in node.value)
    for name, times in names.items():
        if times > 1:
            raise InputError(f"{file} gives {as_typed(name)} twice: keep one of the lines")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _read_text(path: Path, file: str) -> str:
    try:
        return read_small(path, _BYTES_MAX).decode("utf-8")
    except FileNotFoundError:
        raise InputError(f"{file} does not exist: name a YAML file") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text (byte {error.start})") from None
    except ValueError as error:
        raise InputError(f"{file} is {error}: name a YAML file") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


_LAYOUT_OF_EXPERTS = {"expert_model_parallel_size", "expert_tensor_parallel_size"}


def foreign_options(system: str) -> set[str]:
    """The options of other systems that `system` does not have."""
    by_system = selection_options()
    everywhere = {name for its_options in by_system.values() for name in its_options}
    return everywhere - by_system[system].keys()


def expert_options() -> set[str]:
    """The options that a dense model does not have."""
    of_systems = {name for its_options in selection_options().values() for name in its_options}
    of_experts = {each.name for each in options(MoEConfig)} - {"moe_backend"}
    return {EXPERT_SELECTION} | of_systems | of_experts | _LAYOUT_OF_EXPERTS


def without_replaced(
    file: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], str | None]:
    """The options of a file that are compatible with those of the command line.

    Left out are the options of the file's system that the system on the command line does not have.
    With `--num-experts none`, all options for experts are left out. An option that does not belong
    to the file's own system stays, and is refused later.

    Args:
        file: raw values by option name.
        given: those of the command line.

    Returns (options, one line that lists the options left out, or None).
    """
    which = expert_selection()
    old = str(file.get(which.name, which.default))
    new = str(given.get(which.name, old))
    replaced, by = expert_options() - {"num_experts"}, "--num-experts none"
    if given.get("num_experts") != "none":
        try:
            its, others = ({o.name for o in options(selection_of(name))} for name in (old, new))
        except InputError:
            return dict(file), None  # refused later
        replaced, by = its - others, f"{which.flag} {new}"
    gone = {name: value for name, value in file.items() if name in replaced}
    if not gone:
        return dict(file), None
    listed = ", ".join(as_typed(f"{flag(name)} {value}") for name, value in gone.items())
    return {n: v for n, v in file.items() if n not in gone}, f"{by} leaves out {listed}"


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

    Prints help and raises SystemExit(0) for --help [WORD]. Raises InputError for unknown words.
    """
    parser = _parser(arguments)
    for place, word in enumerate(arguments, 1):
        if word.split("=")[0] in ("-h", "--help"):
            about = word.partition("=")[2] or (*arguments[place:], "")[0]
            print(_help(parser, about.strip("-").replace("_", "-").lower()), end="", flush=True)
            raise SystemExit(0)
    check_flags(arguments)
    if [dashed(word.split("=")[0]) for word in arguments].count("--config") > 1:
        raise InputError("--config is given twice: name one file, and change it by flags")
    given = vars(parser.parse_args(arguments))
    file = given.pop("config", None)
    return CommandLine(given, None if file is None else Path(file))


def _import_systems(arguments: Sequence[str]) -> None:
    """Imports the outside system that the words or their file name, whose options are flags."""
    for name, value in pairwise(part for word in arguments for part in word.split("=", 1)):
        with suppress(InputError, OSError):  # what is wrong is said when it is used
            if dashed(name) == "--expert-selection":
                selection_of(value)
            elif name == "--config" and Path(value).is_file():
                selection_of(str(read_yaml(Path(value)).get("expert_selection")))


def check_flags(arguments: Sequence[str], others: dict[str, str] | None = None) -> None:
    """Raises InputError for a flag that training does not have. `others`: that may be meant."""
    parser = _parser(arguments)
    known = parser.flags
    names = [word.split("=")[0] for word in arguments if word.startswith("--")]
    for name in names:
        if dashed(name) not in known:
            add_launching_flags(parser)
            if dashed(name) in parser.flags:
                raise InputError(f"{name} starts ranks, which this program does not: leave it out")
            raise parser.unknown(name, others)


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

    LISTED = "pretrain_gpt_moe.py --help all lists all flags"


def _parser(arguments: Sequence[str]) -> _Parser:
    """The parser of all flags, also of those of an outside system that the words name."""
    _import_systems(arguments)
    parser = _Parser(
        prog="pretrain_gpt_moe.py",
        usage="python pretrain_gpt_moe.py [--nproc-per-node N] [--config FILE.yaml]\n"
        "                              [--flag value ...]",
        description="Pretrain a mixture-of-experts language model. Every YAML key is also a flag; "
        "flags override the file.",
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=help_of_terminal_width,
    )
    group = parser.add_argument_group("config", "The file of options.")
    group.add_argument("--config", metavar="FILE.yaml", help="read options from this file")
    for name, section in common_sections().items():
        group = parser.add_argument_group(name, _first_line(section))
        for each in options(section):
            _add(group, each, f"{each.help} (default: {_text(each.default)})")
        if name == "moe":
            _add_selections(parser)
    return parser


def _help(parser: _Parser, about: str) -> str:
    """The first page of help, or the flags of a section or a system, or those with a word."""
    add_launching_flags(parser)
    sections = {group.title or "": group for group in parser._action_groups if group._group_actions}
    formatter = help_of_terminal_width(parser.prog)
    if not about:
        formatter.add_usage(parser.usage, (), ())
        formatter.add_text(parser.description)
        about_sections = {
            name: re.split(r"[.:;]( |$)", section.description or "")[0]
            for name, section in sections.items()
        }
        _list(formatter, "sections", about_sections)
        _list(formatter, "more help", {
            "--help SECTION": "the flags of a section: --help data",
            "--help SYSTEM": "the options of a system: --help aoe",
            "--help WORD": "flags with a word in their name or text: --help router",
            "--help all": f"all {len(parser.flags)} flags",
        })  # fmt: skip
        return formatter.format_help()
    its = selection_options().get(about.replace("-", "_"))
    word = re.compile(rf"--\S*{re.escape(about)}|.*\b{re.escape(about)}", re.IGNORECASE)
    for name, section in sections.items():
        flags = [
            each
            for each in section._group_actions
            if about in ("all", name)
            or (each.dest in its if its else word.match(f"{each.option_strings[0]} {each.help}"))
            and about not in sections
        ]
        if flags:
            formatter.start_section(name)
            formatter.add_text(section.description)
            formatter.add_arguments(flags)
            formatter.end_section()
    text = formatter.format_help()
    if not text:
        hint = did_you_mean(about, parser.flags) or "--help lists the sections and systems"
        raise InputError(f"--help {as_typed(about)}: no section, system or flag has this: {hint}")
    return text


def _list(formatter: argparse.HelpFormatter, title: str, lines: Mapping[str, str | None]) -> None:
    formatter.start_section(title)
    for name, text in lines.items():
        formatter.add_argument(argparse.Action([], "", metavar=name, help=text))
    formatter.end_section()


def _add_selections(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "selection",
        "The system that selects the experts, and its options. Brackets name the systems that have "
        "an option.",
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
    others = [system for system in selections() if system not in systems]
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
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _first_line(section: type) -> str:
    return (section.__doc__ or "").split("\n\n")[0].replace("\n    ", " ")
