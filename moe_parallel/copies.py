"""Copies of what the host knows to the device."""

import torch


def copied_to(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """`x` on `device`; `x` itself if it is there. The host does not wait for the device.

    A plain copy to a GPU begins when all work before it is done, and the host waits for its end. A
    copy from pinned memory is queued. torch reuses that memory only after the copy.
    """
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
