"""A fault: a text of a file, and what stands there instead."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A text of a file, once in it, and what stands there instead."""

    name: str
    file: str
    old: str
    new: str
    near: tuple[str, ...]  # the tests that are run first
