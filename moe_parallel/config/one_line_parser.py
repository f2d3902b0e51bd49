"""argparse with errors of one line, raised as InputError instead of printed."""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import Any, NoReturn

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

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([dashed(word) for word in words], namespace)

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.split())[:300].removeprefix("argument ")
        raise InputError(f"{message}; --help lists all flags")
