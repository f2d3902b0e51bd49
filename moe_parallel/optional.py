"""Optional packages. They are imported where they are used. An error shows how to install them."""

from __future__ import annotations

import importlib
from types import ModuleType

from moe_parallel.errors import InputError

#: How to install a package if `pip install` with the name of its module is not enough.
INSTALL = {
    "lm_eval": "pip install 'moe-parallel[evaluation]'",
    "transformers": "pip install 'transformers>=5.23'",
    "emerging_optimizers": "pip install 'moe-parallel[muon]'",
    "faiss": "pip install faiss-cpu",
    "pynvml": "pip install nvidia-ml-py",
    "transformer_engine": "on a machine with CUDA, pip install --no-build-isolation "
    "'transformer-engine[core_cu13,pytorch]>=2.20.2,<3'",
}


def import_optional(name: str, wanted_by: str) -> ModuleType:
    """Imports a module of an optional package.

    Args:
        name: the dotted name of the module.
        wanted_by: the flag and its value that need the module.

    Raises:
        InputError: the package is not installed, or this machine lacks a library that it loads
            (Transformer Engine without CUDA); the message then contains the reason.
        ModuleNotFoundError: the package is installed, but a module that it imports is missing.
    """
    package = name.partition(".")[0]
    needs = f"{wanted_by} needs {package}, which"
    install = INSTALL.get(package, f"pip install {package}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, package):
            raise
        raise InputError(f"{needs} is not installed: {install}") from None
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{needs} cannot be imported here ({reason}): {install}") from error
