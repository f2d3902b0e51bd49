"""The random states of one rank: Python, numpy, torch on CPU and GPU, Megatron's tracker.

They are tensors and plain values only, so that reading a state executes no code.
"""

import random
from typing import Any

import numpy
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from moe_parallel.collective_errors import StorageError


def random_state() -> dict[str, Any]:
    """The state of every generator that training may use on this rank."""
    state: Any = numpy.random.get_state()
    name, keys, *place = state
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(numpy.int64)), *place),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned.

    Raises:
        StorageError: `state` is of another kind.
    """
    try:
        name, keys, *place = state["numpy"]  # an array in checkpoints of format 1
        random.setstate(state["python"])
        numpy.random.set_state((name, numpy.asarray(keys).astype(numpy.uint32), *place))
        torch.cuda.set_rng_state(state["cuda"])
        get_cuda_rng_tracker().set_states(state["megatron"])
        torch.set_rng_state(state["torch"])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = type(error).__name__
        raise StorageError(f"its random states are of another kind ({reason})") from error
