"""The device and the communication backend with which this host trains."""

import torch

from moe_parallel.errors import InputError
from moe_parallel.platform.memory import peak_host_memory

DISTRIBUTED_BACKENDS = ("gloo", "nccl")


def device() -> torch.device:
    """The current CUDA device if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def take_gpu(local_rank: int) -> None:
    """Use the GPU with this process's local rank. Raises InputError if the node has too few."""
    if local_rank >= torch.cuda.device_count():
        raise InputError(
            f"this node has {torch.cuda.device_count()} GPUs, and process {local_rank + 1} finds "
            "none left: start at most as many (--nproc-per-node)"
        )
    torch.cuda.set_device(local_rank)


def multiplies_bf16(x: torch.Tensor) -> bool:
    """Whether the device of x has instructions for products in bf16; without them they are slow."""
    return x.is_cuda or torch.cpu._is_avx512_bf16_supported()


def fast_factors(*factors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The factors of a product, all of one dtype, in one that the device multiplies fast.

    This is fp32 instead of bf16 where `multiplies_bf16` is false, and otherwise their own.
    """
    if factors[0].dtype == torch.bfloat16 and not multiplies_bf16(factors[0]):
        return tuple(factor.float() for factor in factors)
    return factors


def peak_memory() -> int:
    """The most memory that this process has used at once, in bytes.

    This counts tensors on the current CUDA device if there is one, else the resident set.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return peak_host_memory()


def default_backend() -> str:
    """'nccl' if CUDA is available, else 'gloo'."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def choose_backend(requested: str | None) -> str:
    """The value of --distributed-backend, checked; None selects the default of this host.

    Raises:
        InputError: an unknown backend, or nccl on a host without CUDA.
    """
    backend = requested or default_backend()
    if backend not in DISTRIBUTED_BACKENDS:
        raise InputError(
            f"--distributed-backend {backend} is unknown: choose from "
            f"{', '.join(DISTRIBUTED_BACKENDS)}"
        )
    if backend == "nccl" and not torch.cuda.is_available():
        raise InputError(
            "--distributed-backend nccl needs CUDA, which this host does not have: "
            "use --distributed-backend gloo"
        )
    return backend
