"""argparse whose errors are InputErrors: one line, for whoever prints it and ends the program."""

from __future__ import annotations

import argparse
from typing import NoReturn

from moe_parallel.errors import InputError


class OneLineParser(argparse.ArgumentParser):
    """As argparse, but a wrong line raises InputError instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.split())[:300].removeprefix("argument ")
        raise InputError(f"{message}; --help lists all flags")
