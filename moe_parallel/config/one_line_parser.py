"""argparse with errors of one line, raised as InputError instead of printed."""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import Any, NoReturn

from moe_parallel.config.message import as_typed, did_you_mean
from moe_parallel.errors import InputError


def dashed(word: str) -> str:
    """A word of a command line with dashes in its flag: `--num-layers=4` for `--num_layers=4`."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def help_of_terminal_width(prog: str) -> argparse.HelpFormatter:
    """Help in two columns, as wide as the terminal but not too wide to read."""
    width = min(98, shutil.get_terminal_size().columns - 2)
    return argparse.HelpFormatter(prog, max_help_position=34, width=width)


class OneLineParser(argparse.ArgumentParser):
    """argparse, but a wrong command line raises InputError instead of printing the usage.

    Flags may have underscores, as in Python and in YAML.
    """

    LISTED = "--help lists all flags"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([dashed(word) for word in words], namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = self.parse_known_args(args, namespace)
        for word in rest:
            if word.startswith("--"):
                raise self.unknown(word.split("=")[0])
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found

    def unknown(self, word: str, more: dict[str, str] | None = None) -> InputError:
        """The error for a flag that does not exist. `more`: other flags that may be meant."""
        hint = did_you_mean(word, self.flags | (more or {})) or self.LISTED
        return InputError(f"{as_typed(word)} is not a flag of this program: {hint}")

    @property
    def flags(self) -> dict[str, str]:
        """The flags, also of commands, and their help."""
        parsers: list[argparse.ArgumentParser] = [self]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
        return {
            flag: action.help or ""
            for parser in parsers
            for flag, action in parser._option_string_actions.items()
            if flag.startswith("--")
        }

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.split())[:300].removeprefix("argument ")
        raise InputError(f"{message}; {self.LISTED}")
