"""The first import of Megatron-Core in a program: without its warnings, and in less time."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from moe_parallel.platform.suppress_warnings import suppress_warnings


def import_megatron() -> None:
    """Import megatron.core. Call it before any other import of it.

    Megatron-Core decorates small functions with torch.compile, which imports torch's Inductor for
    more than a second. No model here calls these functions (every fusion in
    `model.transformer_config` is off), so without a GPU they stay as they are.
    """
    suppress_warnings()
    if torch.cuda.is_available():
        return
    with mock.patch.object(torch, "compile", _as_it_is):
        from megatron.core.jit import disable_jit_fuser
    disable_jit_fuser()  # for the modules that are imported later


def _as_it_is(function: Any = None, **options: Any) -> Any:
    """torch.compile, as a decorator with or without arguments, that compiles nothing."""
    return (lambda decorated: decorated) if function is None else function
