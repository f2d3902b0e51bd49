"""Packages that not every machine has: looked for where they are used, and asked for by name."""

from __future__ import annotations

import importlib
from types import ModuleType

from moe_parallel.errors import InputError

#: How to get a package, where that is not `pip install` and the name of its module.
INSTALL = {
    "faiss": "pip install faiss-cpu",
    "transformer_engine": "on a machine with CUDA, pip install --no-build-isolation "
    "'transformer-engine[core_cu13,pytorch]==2.20.2'",
}


def import_optional(name: str, wanted_by: str) -> ModuleType:
    """Import a module of an optional package.

    Args:
        name: dotted.
        wanted_by: what needs it, in the user's words: the flag and its value.

    Raises:
        InputError: the package is not installed, or this machine lacks a library that it loads
            (Transformer Engine without CUDA): then the reason is told.
        ModuleNotFoundError: it is installed, and lacks a module of its own or of others.
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
