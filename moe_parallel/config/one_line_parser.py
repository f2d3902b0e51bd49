"""argparse whose errors are InputErrors: one line, for whoever prints it and ends the program."""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import Any, NoReturn

from moe_parallel.errors import InputError


def dashed(word: str) -> str:
    """A word of a command line, `--num_layers=4` as `--num-layers=4`."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def help_of_terminal_width(prog: str) -> argparse.HelpFormatter:
    """Help in two columns, as wide as the terminal and no wider than is read with ease."""
    width = min(98, shutil.get_terminal_size().columns - 2)
    return argparse.HelpFormatter(prog, max_help_position=34, width=width)


class OneLineParser(argparse.ArgumentParser):
    """As argparse, but a wrong line raises InputError instead of printing the usage.

    Flags may be typed with underscores, as in Python and in YAML.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([dashed(word) for word in words], namespace)

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.split())[:300].removeprefix("argument ")
        raise InputError(f"{message}; --help lists all flags")
