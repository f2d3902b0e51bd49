"""Megatron-Core: the versions that this project supports, and its first import in a program.

The code is the same for all versions; what only some need stands in `cpu_host.REPLACED`.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any
from unittest import mock

import torch
from packaging.specifiers import SpecifierSet

from moe_parallel.errors import InputError

#: Those of pyproject.toml. CI runs 0.16.1, the last one for Python 3.11, and 0.19.2.
SUPPORTED = ">=0.16.1,<0.20"
INSTALL = f"pip install 'megatron-core{SUPPORTED}'"


def installed_version() -> str:
    """The version of the installed megatron-core.

    Raises:
        InputError: it is not installed.
    """
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        raise InputError(f"megatron-core is not installed: {INSTALL}") from None


def check_megatron_version() -> str:
    """Returns the installed version of megatron-core.

    Raises:
        InputError: it is missing, or its version is not a supported one.
    """
    version = installed_version()
    if version not in SpecifierSet(SUPPORTED):
        raise InputError(
            f"megatron-core {version} is installed, and this project is written for "
            f"{SUPPORTED}: {INSTALL}"
        )
    return version


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


@dataclass(frozen=True)
class Notice:
    """A message, identified by its beginning (for `warnings` a regular expression), and the reason
    why it is not shown."""

    beginning: str
    reason: str
    logger: str | None = None  # None: the message comes through `warnings`
    category: type[Warning] = UserWarning

    def suppress(self) -> None:
        if self.logger is None:
            warnings.filterwarnings("ignore", message=self.beginning, category=self.category)
        else:
            logger = logging.getLogger(self.logger)
            logger.addFilter(lambda record: not str(record.msg).startswith(self.beginning))


UNKNOWN_MLP = Notice(
    "Unknown MLP type",
    "our layers are given their process groups by their spec, and need no others",
    logger="megatron.core.transformer.transformer_layer",
)

NOTICES = (
    UNKNOWN_MLP,
    Notice("full scope is deprecated", "about a default of Megatron-Core's own"),
    Notice("MimoModelConfig is experimental", "no such model is used here"),
    Notice(
        "The .grad attribute of a Tensor that is not a leaf",
        "Megatron-Core's distributed optimizer looks for gradients in its shards of the weights",
    ),
    Notice(
        "`torch.distributed.(all_gather_into|reduce_scatter)_tensor` is deprecated",
        "Megatron-Core calls them",
        category=FutureWarning,
    ),
    Notice(
        "If you are using transformer_engine as the transformer implementation",
        "attention is not Transformer Engine's; docs/parallelism.md says what core_attn saves",
    ),
    Notice("Apex is not installed", "norms and products are our own"),
    Notice(
        "Transformer Engine and Apex are not installed",
        "torch's fused Adam serves; --fp8-format says itself what it needs",
    ),
    Notice(
        "Using a large number of experts",
        "routers compute in fp32 here, whatever the option of Megatron-Core's own router is",
    ),
    Notice(
        r"barrier\(\): using the device under current context",
        "each rank has chosen its GPU before",
    ),
    Notice(
        "invalid escape sequence",
        "in a file of Megatron-Core, when Python compiles it first",
        category=SyntaxWarning,
    ),
    Notice(
        "Could not determine rank from torch.distributed",
        "a tool of one process has no rank",
    ),
    Notice(
        "DistributedDataParallel: full_param_layout not provided",
        "Megatron-Core computes the layout itself",
        logger="megatron.core.distributed.distributed_data_parallel",
    ),
    Notice(
        "GPTModel IS DEPRECATED",
        "0.16.1 has no successor to it",
        logger="megatron.core.models.gpt.gpt_model",
    ),
)

#: They are about GPUs, on a host without one.
NOTICES_ABOUT_GPUS = (
    Notice("No CUDA runtime is found", "there is no GPU", logger="torch.utils.cpp_extension"),
    Notice(
        "CPU RNG state changed within GPU RNG context",
        "the forked generator is the CPU's, so that its state moves is the point",
        logger="megatron.core.tensor_parallel.random",
    ),
)


def suppress_warnings() -> None:
    """Suppress these messages. Call it before the first import of megatron.core."""
    for notice in NOTICES if torch.cuda.is_available() else NOTICES + NOTICES_ABOUT_GPUS:
        notice.suppress()
