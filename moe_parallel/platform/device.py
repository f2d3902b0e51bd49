"""Which device and which communication backend this host trains with."""

import resource
import sys

import torch

from moe_parallel.errors import InputError

BACKENDS = ("gloo", "nccl")


def device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def peak_memory() -> int:
    """The most memory that this process has held at once, in bytes.

    Of tensors on the current CUDA device where there is one, else its resident set.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # of getrusage
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def default_backend() -> str:
    """'nccl' where CUDA is available, else 'gloo'."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def choose_backend(requested: str | None) -> str:
    """The value of --distributed-backend, checked; None means what suits this host.

    Raises:
        InputError: an unknown backend, or nccl on a host without CUDA.
    """
    backend = requested or default_backend()
    if backend not in BACKENDS:
        raise InputError(
            f"--distributed-backend {backend} is unknown: choose from {', '.join(BACKENDS)}"
        )
    if backend == "nccl" and not torch.cuda.is_available():
        raise InputError(
            "--distributed-backend nccl needs CUDA, which this host does not have: "
            "use --distributed-backend gloo"
        )
    return backend
