"""How evenly the ranks of an expert-parallel group are loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

PERCENTILES = (50, 90, 99)


def rank_load(layers: Sequence[Mapping[str, Any]], ranks: int) -> dict[str, Any] | None:
    """The load of the expert-parallel ranks: the choices of a rank's experts over the mean rank's.

    It is taken for every layer and rank. The result is exact, because the counts are: a run that
    continues on the same layout reports the same.

    Args:
        layers: a record's `layers`, with `tokens_per_expert` before capacity drops any.
        ranks: the size of the expert-parallel group. Rank r has the r-th of as many equal parts of
            the experts.

    Returns None if one rank has all experts, or if there was no choice. Otherwise overload (the
    greatest load: 1 is even, `ranks` is the worst), its layer and expert-parallel rank, and the
    percentiles p50, p90 and p99 of the loads (the smallest load that so many percent do not
    exceed).
    """
    loads = [
        (load, layer["layer"], rank)
        for layer in layers
        for rank, load in enumerate(_loads(layer["tokens_per_expert"], ranks))
    ]
    if ranks == 1 or not loads:
        return None
    overload, layer, rank = max(loads, key=lambda each: each[0])
    ordered = sorted(load for load, _, _ in loads)
    return {
        "overload": overload,
        "layer": layer,
        "expert_parallel_rank": rank,
        **{f"p{p}": ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in PERCENTILES},
    }


def _loads(tokens_per_expert: Sequence[int], ranks: int) -> list[float]:
    each, total = len(tokens_per_expert) // ranks, sum(tokens_per_expert)
    if not total:
        return []
    parts = [sum(tokens_per_expert[first : first + each]) for first in range(0, each * ranks, each)]
    return [part * ranks / total for part in parts]
