"""Libraries that only similarity batching needs, found when they are used."""

import importlib
from typing import Any

from moe_parallel.errors import InputError


def optional(module: str, package: str, wanted_by: str) -> Any:
    """Import `module`, which `pip install package` brings.

    Raises:
        InputError: it is not installed. An installed one that fails to import says so itself.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise InputError(
            f"{wanted_by} needs {module}, which is not installed: pip install {package}"
        ) from None
