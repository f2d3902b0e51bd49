"""The first import of Megatron-Core in a program: without its warnings, and in less time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch

from moe_parallel.platform.suppress_warnings import suppress_warnings


def import_megatron() -> None:
    """Import megatron.core. Call it before any other import of it.

    Megatron-Core decorates small functions with torch.compile, which imports torch's Inductor for
    more than a second. No model here calls these functions (every fusion in
    `model.transformer_config` is off), so without a GPU they stay as they are.

    Megatron-Core's own logging and inference import wandb, if it is installed, for almost a second.
    Neither is used here: `telemetry` imports wandb when a run asks for it.
    """
    suppress_warnings()
    with _hidden("wandb"):
        if torch.cuda.is_available():
            import_module("megatron.core")
            return
        with mock.patch.object(torch, "compile", _as_it_is):
            from megatron.core.jit import disable_jit_fuser
    disable_jit_fuser()  # for the modules that are imported later


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """The package cannot be imported, unless it has been before."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


def _as_it_is(function: Any = None, **options: Any) -> Any:
    """torch.compile, as a decorator with or without arguments, that compiles nothing."""
    return (lambda decorated: decorated) if function is None else function
