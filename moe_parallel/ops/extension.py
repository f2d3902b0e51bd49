"""Finding and loading the compiled extension `moe_parallel._C`."""

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import torch

from moe_parallel.errors import InputError

NAME = "moe_parallel._C"
#: It compiles against the torch that is installed; with build isolation pip may bring another.
BUILD = "`make set-up` or `pip install --no-build-isolation --force-reinstall --no-deps .`"


def is_built() -> bool:
    """Whether an extension is built for this Python; it may still be for another torch."""
    return importlib.util.find_spec(NAME) is not None


def load() -> ModuleType:
    """Load the extension, which registers the operators `torch.ops.moe_parallel.*`.

    Raises InputError if it is not built, if it was built for another torch, or if MOE_PARALLEL_CPU
    names vector instructions that this processor lacks.
    """
    spec = importlib.util.find_spec(NAME)
    if spec is None or spec.origin is None:
        raise InputError(
            "--moe-backend native needs the C++ extension, which is not built: build it with "
            f"{BUILD}, or use --moe-backend reference"
        )
    built_for = _built_for(Path(spec.origin))
    if _release(built_for) != _release(torch.__version__):
        raise InputError(_mismatch(f"it was built for torch {built_for}"))
    try:
        module = importlib.import_module(NAME)
    except ImportError as error:  # built for CUDA, and this torch of the same release is not
        raise InputError(_mismatch(str(error))) from error
    try:
        module.build_info()
    except ValueError as error:  # MOE_PARALLEL_CPU
        raise InputError(str(error)) from error
    return module


def has_cuda() -> bool:
    """Whether the extension contains CUDA kernels."""
    return bool(load().build_info()["cuda"])


def _built_for(path: Path) -> str:
    """The version of torch that the extension was compiled against, without loading it: against
    another one it may not load, or crash (csrc/bindings.cpp)."""
    version = re.search(rb"moe_parallel was built for torch ([^\0]+)\0", path.read_bytes())
    return version[1].decode() if version else "of an unknown version"


def _release(version: str) -> str:
    """2.13.0+cu130 -> 2.13.0: CPU code is the same in every build of one release."""
    return version.partition("+")[0]


def _mismatch(reason: str) -> str:
    return (
        f"the C++ extension does not fit torch {torch.__version__} ({reason}): build it again with "
        f"{BUILD}, or use --moe-backend reference"
    )
