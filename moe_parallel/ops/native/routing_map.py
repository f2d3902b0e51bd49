"""Choices sorted by expert."""

import torch
from torch import Tensor

from moe_parallel.ops.native.fake import fake
from moe_parallel.ops.types import RowMap

_ops = torch.ops.moe_parallel


def routing_map(
    experts_TK: Tensor,
    num_experts: int,
    pad_rows_per_expert: int | None = None,
    num_rows: int | None = None,
    max_rows: int | None = None,
) -> RowMap:
    return RowMap(
        *_ops.routing_map(experts_TK, num_experts, pad_rows_per_expert, num_rows, max_rows)
    )


@fake("routing_map")
def _(
    experts: Tensor,
    num_experts: int,
    pad_rows_per_expert: int | None,
    num_rows: int | torch.SymInt | None,
    max_rows: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if pad_rows_per_expert is not None:
        num_rows = num_experts * pad_rows_per_expert
    elif max_rows is not None:
        num_rows = max_rows
    elif num_rows is None:
        num_rows = torch.library.get_ctx().new_dynamic_size()
    return (
        experts.new_empty(num_rows),
        experts.new_empty(experts.shape),
        experts.new_empty(num_experts),
    )
