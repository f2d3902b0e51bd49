"""Memory of one forward and backward pass: the peak, and the bytes kept for the backward pass."""

from __future__ import annotations

import gc
import os

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tools.bench.contender import BenchContender

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler logs its start and stop


def saved_bytes(contender: BenchContender) -> int:
    """Bytes that the forward pass keeps for the backward pass. Each storage counts once.

    Parameters do not count: they exist anyway. The tokens count, because they are activations.
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
    del outputs  # before this, nothing was freed, so no two storages had the same address
    return sum(kept.values())


def peak_bytes(contender: BenchContender, device: str) -> int:
    """The most bytes allocated at one time beyond those before, including gradients."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contender.run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()  # otherwise memory that is freed during the pass would reduce the peak
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True, acc_events=True) as profiled:
        contender.run()
    return _peak(profiled)


def _peak(profiled: profile) -> int:
    """The highest sum of the allocations and releases so far.

    It reads the events behind the profile, because the public summary sums them per operator.
    """
    events = profiled.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        peak = max(peak, held)
    return peak
