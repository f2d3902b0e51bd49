"""The selections on a text whose batches and layers are divided over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, groupby, islice

import torch
import torch.distributed as dist

from moe_parallel.analysis.selections import TextSelections
from moe_parallel.model.forward import Batch
from moe_parallel.parallel import Groups


def batches_of_rank(batches: Iterable[Batch], dp: dist.ProcessGroup) -> Iterator[tuple[int, Batch]]:
    """The batches that a rank of `dp` reads, each with the number of its first sequence.

    The ranks take turns. All read as many: one without a batch in the last turn repeats another
    with an empty loss mask.
    """
    numbered = enumerate(batches)
    while turn := list(islice(numbered, dp.size())):
        number, batch = turn[min(dp.rank(), len(turn) - 1)]
        if dp.rank() >= len(turn):
            batch = {**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])}
        yield number * len(batch["tokens"]), batch


def on_all_layers(part: TextSelections, groups: Groups) -> list[TextSelections]:
    """Joins the selections of each rank's layers to those of all layers, in the order of the text.

    One for each data-parallel rank, on rank 0; [] elsewhere. Collective over all ranks.
    """
    place = groups.dp.rank(), groups.pp.rank()
    mine = {place: part} if groups.tp.rank() == 0 else {}
    parts = [mine] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, parts, dst=0)
    stages = {place: part for each in parts or () for place, part in each.items()}
    found = []
    for _, places in groupby(sorted(stages), key=lambda place: place[0]):
        of_stages = [stages[place] for place in places]
        layers = chain.from_iterable(each.layers for each in of_stages)
        found.append(replace(of_stages[0], layers=tuple(layers)))
    return found
