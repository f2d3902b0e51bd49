"""--deterministic-mode: what it sets in torch, cuBLAS, NCCL and Transformer Engine."""

from __future__ import annotations

import os

import torch

from moe_parallel.config import Config
from moe_parallel.errors import InputError

#: Environment variables that a library reads, and the values with which it is deterministic; the
#: first is set if there is none.
VARIABLES = {
    # cuBLAS: the sizes of its workspace with which it repeats its results, as torch demands them.
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    # NCCL: the algorithms that Megatron accepts; NVLS reduces in the switch.
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
    # Transformer Engine: the attention kernels that it may take.
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}


def be_deterministic(config: Config) -> None:
    """Choose deterministic algorithms for this process, before it uses a GPU or communicates.

    An operator of torch without such an algorithm raises RuntimeError from then on.

    Raises:
        InputError: an environment variable asks for something else, or this host has a GPU and the
            system of expert selection cannot be deterministic on it.
    """
    if torch.cuda.is_available() and hasattr(config.selection, "moe_top_p"):
        raise InputError(
            f"--deterministic-mode: --expert-selection {config.selection.system} sums "
            "probabilities by torch's cumsum, which is not deterministic on a GPU: choose another "
            "system, or leave the mode out"
        )
    for name, values in VARIABLES.items():
        value = os.environ.setdefault(name, values[0])
        if value not in values:
            raise InputError(
                f"--deterministic-mode: the environment variable {name} is {value!r}: "
                f"set it to {' or '.join(values)}, or remove it"
            )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
