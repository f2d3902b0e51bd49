"""Dispatch of tokens to experts and combination of outputs. The layout selects the dispatcher."""

from typing import Any

from moe_parallel.dispatch.all_to_all import AllToAllDispatcher
from moe_parallel.dispatch.dispatched import Dispatched, Dispatcher
from moe_parallel.dispatch.local import LocalDispatcher
from moe_parallel.ops import Ops
from moe_parallel.parallel import Groups
from moe_parallel.telemetry.progress import Progress


def build_dispatcher(
    num_experts: int, groups: Groups, ops: Ops, progress: Progress, send_c: bool = False
) -> Dispatcher[Any]:
    """The local dispatcher if this rank holds every expert completely; otherwise all-to-all.

    `progress` is told when this rank exchanges rows. `send_c`: send C = x W_down with the rows that
    go to other ranks.
    """
    if groups.etp_ep.size() == 1:
        return LocalDispatcher(num_experts, ops)
    return AllToAllDispatcher(
        num_experts, groups.etp_ep, groups.etp.size(), ops, takes_c=send_c, progress=progress
    )


__all__ = ["AllToAllDispatcher", "Dispatched", "Dispatcher", "LocalDispatcher", "build_dispatcher"]
