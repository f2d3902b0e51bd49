"""Finding and loading the compiled extension `moe_parallel._C`."""

import importlib
import importlib.util
from types import ModuleType

import torch

from moe_parallel.errors import InputError

NAME = "moe_parallel._C"
BUILD_COMMAND = "pip install -e ."


def is_built() -> bool:
    """Whether an extension is built for this Python; it may still be for another torch."""
    return importlib.util.find_spec(NAME) is not None


def load() -> ModuleType:
    """Load the extension, which registers the operators `torch.ops.moe_parallel.*`.

    Raises InputError if it is not built, if it was built for another torch, or if MOE_PARALLEL_CPU
    names vector instructions that this processor lacks.
    """
    if not is_built():
        raise InputError(
            "--moe-backend native needs the C++ extension, which is not built: "
            f"run `{BUILD_COMMAND}`, or use --moe-backend reference"
        )
    try:
        module = importlib.import_module(NAME)
    except ImportError as error:
        raise InputError(_mismatch(str(error))) from error
    try:
        built_for = module.build_info()["torch"]
    except ValueError as error:  # MOE_PARALLEL_CPU
        raise InputError(str(error)) from error
    if _release(built_for) != _release(torch.__version__):
        raise InputError(_mismatch(f"it was built for torch {built_for}"))
    return module


def has_cuda() -> bool:
    """Whether the extension contains CUDA kernels."""
    return bool(load().build_info()["cuda"])


def _release(version: str) -> str:
    """2.13.0+cu130 -> 2.13.0: CPU code is the same in every build of one release."""
    return version.partition("+")[0]


def _mismatch(reason: str) -> str:
    return (
        f"the C++ extension does not fit torch {torch.__version__} ({reason}): "
        f"build it again with `{BUILD_COMMAND}`, or use --moe-backend reference"
    )
