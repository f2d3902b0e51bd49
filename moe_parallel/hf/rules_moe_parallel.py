"""Stands for `moe_parallel.selection.rules`, of which an export has a copy under this name."""

from moe_parallel.selection.rules import *  # noqa: F403
