"""Taking tokens to experts and results back; the dispatcher is chosen once, by the layout."""

from typing import Any

from moe_parallel.dispatch.all_to_all import AllToAllDispatcher
from moe_parallel.dispatch.dispatched import Dispatched, Dispatcher
from moe_parallel.dispatch.local import LocalDispatcher
from moe_parallel.ops import Ops
from moe_parallel.parallel import Groups


def build_dispatcher(
    num_experts: int, groups: Groups, ops: Ops, send_c: bool = False
) -> Dispatcher[Any]:
    """Local where this rank holds every expert whole, all-to-all elsewhere.

    `send_c`: where rows travel, C = x W_down travels with them.
    """
    if groups.etp_ep.size() == 1:
        return LocalDispatcher(num_experts, ops)
    return AllToAllDispatcher(num_experts, groups.etp_ep, groups.etp.size(), ops, takes_c=send_c)


__all__ = ["AllToAllDispatcher", "Dispatched", "Dispatcher", "LocalDispatcher", "build_dispatcher"]
