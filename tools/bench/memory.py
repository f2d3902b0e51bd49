"""Memory of one forward and backward pass: its peak, and what is kept for the backward pass."""

from __future__ import annotations

import gc
import os

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tools.bench.contender import Contender

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler tells when it starts and stops


def saved_bytes(contender: Contender) -> int:
    """Bytes that the forward pass keeps for the backward pass, each storage once.

    Parameters are left out: they are there anyway. The tokens count, as they are activations.
    """
    kept: dict[int, int] = {}
    parameters = {contender.leaves[name].untyped_storage().data_ptr() for name in contender.weights}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = contender.forward()
    del outputs  # until here nothing was freed, so no two storages had one address
    return sum(kept.values())


def peak_bytes(contender: Contender, device: str) -> int:
    """The most that was allocated at once beyond what was there before; gradients included."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contender.run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()  # what is freed on the way would otherwise be taken off the peak
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        contender.run()
    return _peak(profiled)


def _peak(profiled: profile) -> int:
    """The highest sum of the allocations and releases so far.

    The events behind the profile are read, as its public summary adds them up per operator.
    """
    events = profiled.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        peak = max(peak, held)
    return peak
