"""Rows of each expert, padded to a multiple: what FP8 matrix products ask of them."""

import torch
from torch.nn import functional

from moe_parallel.ops.types import RowMap


def aligned_rows(row_map: RowMap, multiple: int) -> tuple[RowMap, list[int]]:
    """The same rows, those of each expert followed by padding up to a multiple of `multiple`.

    An expert without rows stays without. Returns the counts as a list as well: a product that
    takes each expert's size from the host needs it, and it is the only thing waited for here.
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
