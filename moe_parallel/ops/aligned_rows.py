"""Rows of each expert, padded to a multiple, which FP8 matrix products require."""

import torch
from torch.nn import functional

from moe_parallel.ops.types import RowMap


def aligned_rows(row_map: RowMap, multiple: int) -> tuple[RowMap, list[int]]:
    """The same rows, with the rows of each expert padded at their end to a multiple of `multiple`.

    An expert without rows gets none. The counts are also returned as a list, for products that
    take each expert's size from the host. On a GPU this list is the only wait here.
    """
    counts_E = row_map.counts_E
    aligned_E = (counts_E + multiple - 1).div(multiple, rounding_mode="floor") * multiple
    rows_of_experts = aligned_E.tolist()

    padding_E = aligned_E - counts_E
    padding_before_E = padding_E.cumsum(0) - padding_E
    num_rows = row_map.slots_N.numel()
    shift_N = padding_before_E.repeat_interleave(counts_E, output_size=num_rows)
    row_N = torch.arange(num_rows, device=counts_E.device) + shift_N

    slots = row_map.slots_N.new_full((sum(rows_of_experts),), -1)
    slots[row_N] = row_map.slots_N
    rows_TK = functional.pad(row_N, (0, 1), value=-1)[row_map.rows_TK]  # -1 stays -1
    return RowMap(slots, rows_TK, aligned_E), rows_of_experts
