"""Dispatch of tokens to experts and combination of outputs. The layout selects the dispatcher."""

from typing import Any

from moe_parallel.dispatch.all_to_all import AllToAllDispatcher
from moe_parallel.dispatch.dispatched import Dispatched, Dispatcher, LocalDispatcher, RowBudget
from moe_parallel.dispatch.in_parts import AllToAllInParts
from moe_parallel.ops import Ops
from moe_parallel.parallel import Groups
from moe_parallel.telemetry.progress import Progress


def build_dispatcher(
    num_experts: int,
    groups: Groups,
    ops: Ops,
    progress: Progress,
    parts: int = 1,
) -> Dispatcher[Any]:
    """The local dispatcher if this rank holds every expert completely; otherwise all-to-all.

    `progress` is told when this rank exchanges rows. `parts`: divide the experts of a rank into
    parts, and send the rows of each part by themselves.
    """
    if groups.etp_ep.size() == 1:
        return LocalDispatcher(num_experts, ops)
    build = AllToAllDispatcher if parts == 1 else AllToAllInParts
    return build(num_experts, groups.etp_ep, groups.etp.size(), ops, progress, parts)


__all__ = [
    "AllToAllDispatcher",
    "AllToAllInParts",
    "Dispatched",
    "Dispatcher",
    "LocalDispatcher",
    "RowBudget",
    "build_dispatcher",
]
