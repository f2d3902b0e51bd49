"""Megatron-Core: the versions that this project supports, and its first import in a program.

The code is the same for all versions; what only some need stands in `cpu_host.REPLACED`.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from packaging.specifiers import SpecifierSet

from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional

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


#: The versions whose Muon takes emerging-optimizers 0.3.
WITH_MUON = ">=0.19,<0.20"


def has_muon() -> bool:
    """Whether Megatron-Core has its Muon here, with the package that it needs."""
    return installed_version() in SpecifierSet(WITH_MUON) and bool(find_spec("emerging_optimizers"))


def check_muon() -> None:
    """Raises InputError unless `has_muon`."""
    version = installed_version()
    if version not in SpecifierSet(WITH_MUON):
        raise InputError(
            f"--optimizer muon needs megatron-core {WITH_MUON}, and {version} is installed: with "
            f"Python 3.12 or later, pip install 'megatron-core{WITH_MUON}' 'moe-parallel[muon]'"
        )
    import_optional("emerging_optimizers", "--optimizer muon")


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


#: The beginnings of warnings that are not shown, as regular expressions.
WARNINGS = (
    "full scope is deprecated",  # a default of Megatron-Core's own
    "MimoModelConfig is experimental",  # no such model is used here
    # Megatron-Core's distributed optimizer looks for gradients in its shards of the weights.
    "The .grad attribute of a Tensor that is not a leaf",
    r"`torch.distributed.(all_gather_into|reduce_scatter)_tensor` is deprecated",  # it calls them
    # Attention is not Transformer Engine's; docs/parallelism.md says what core_attn saves.
    "If you are using transformer_engine as the transformer implementation",
    "Apex is not installed",  # norms and products are our own
    # torch's fused Adam serves; --fp8-format says itself what it needs.
    "Transformer Engine and Apex are not installed",
    # Routers compute in fp32 here, whatever the option of Megatron-Core's own router is.
    "Using a large number of experts",
    r"barrier\(\): using the device under current context",  # each rank has chosen its GPU before
    "invalid escape sequence",  # in a file of Megatron-Core, when Python compiles it first
    "Could not determine rank from torch.distributed",  # a tool of one process has no rank
)
_CORE = "megatron.core"
#: Our layers are given their process groups by their spec, and need no others.
UNKNOWN_MLP = f"{_CORE}.transformer.transformer_layer", "Unknown MLP type"
#: By logger, the beginnings of messages that are not shown.
MESSAGES = {
    # Megatron-Core computes the layout itself.
    f"{_CORE}.distributed.distributed_data_parallel": (
        "DistributedDataParallel: full_param_layout not provided"
    ),
    UNKNOWN_MLP[0]: UNKNOWN_MLP[1],
    f"{_CORE}.models.gpt.gpt_model": "GPTModel IS DEPRECATED",  # 0.16.1 has no successor to it
}
#: On a host without a GPU: of one, and that the forked generator, which is the CPU's, moves.
MESSAGES_ABOUT_GPUS = {
    "torch.utils.cpp_extension": "No CUDA runtime is found",
    f"{_CORE}.tensor_parallel.random": "CPU RNG state changed within GPU RNG context",
}


def suppress_warnings() -> None:
    """Suppress these messages. Call it before the first import of megatron.core."""
    for beginning in WARNINGS:
        for category in (UserWarning, FutureWarning, SyntaxWarning):
            warnings.filterwarnings("ignore", message=beginning, category=category)
    of_loggers = MESSAGES if torch.cuda.is_available() else MESSAGES | MESSAGES_ABOUT_GPUS
    for logger in of_loggers:
        suppress_message(logger, of_loggers[logger])


def suppress_message(logger: str, beginning: str) -> None:
    """Suppress the messages of a logger that begin so."""
    logging.getLogger(logger).addFilter(lambda record: not str(record.msg).startswith(beginning))
