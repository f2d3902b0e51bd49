"""One gloo device for all groups of a process.

torch gives each gloo group a device of its own: a thread that looks at the group's sockets a
hundred times a second, even if nothing is sent. Megatron-Core makes 20 groups. Their threads took
3% of a core of an AMD EPYC (Zen 3) per rank. One device can serve any number of groups.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

c10d: Any = dist.distributed_c10d  # its stubs leave out the options of gloo


@contextmanager
def share_gloo_device() -> Iterator[None]:
    """The gloo groups that are made inside use the device of the default group, if it is gloo's.

    torch.distributed must be initialized. `new_group` passes no options to gloo, so inside it finds
    another class under the name of gloo's.
    """
    gloo = c10d.ProcessGroupGloo
    cpu = torch.device("cpu")
    default: Any = dist.group.WORLD
    backend = default._get_backend(cpu) if cpu in default._device_types else None
    if not isinstance(backend, gloo):
        yield
        return
    devices = backend.options._devices

    class OnSharedDevice(dist.ProcessGroupGloo):
        def __init__(
            self,
            store: dist.Store,
            rank: int,
            size: int,
            timeout: timedelta,
            enable_reconfigure: bool = False,  # of torch 2.15, which passes it
        ) -> None:
            options = gloo._Options()
            options._timeout = timeout
            options._devices = devices
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OnSharedDevice
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = gloo
