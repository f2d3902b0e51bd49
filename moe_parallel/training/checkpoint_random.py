"""The random states of one rank: Python, numpy, torch on CPU and GPU, Megatron's tracker."""

import random
from typing import Any

import numpy
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def random_state() -> dict[str, Any]:
    """Every generator that training may draw from on this rank."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` returned."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["megatron"])
    torch.set_rng_state(state["torch"])
