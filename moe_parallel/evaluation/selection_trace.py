"""Collects the selections of a model while it reads text. The model is not changed.

Its layers and the batches may be divided over ranks.

Shape suffixes: S tokens of a sequence, B sequences, T = S * B tokens (Megatron's order), E experts,
M stretches of a sequence with one merge each, P = M * B merged experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from moe_parallel.analysis.selections import (
    ChosenExperts,
    LayerSelections,
    MergedSelections,
    TextSelections,
)
from moe_parallel.evaluation.model import ReadingModel
from moe_parallel.layers import DispatchedLayer
from moe_parallel.layers.merged import MergedLayer
from moe_parallel.model.forward import Batch
from moe_parallel.parallel import Groups
from moe_parallel.selection.choices import BiasedRule, Choices, Rule
from moe_parallel.selection.segments import Merges
from moe_parallel.selection.tokens import Tokens

RecordSelections = Callable[[LayerSelections], None]


def expert_layers(model: Any) -> list[DispatchedLayer | MergedLayer]:
    """The layers with experts, in order."""
    kinds = (DispatchedLayer, MergedLayer)
    return [layer for layer in model.modules() if isinstance(layer, kinds)]


def selections_of(
    model: ReadingModel, batches: Iterable[tuple[int, Batch]], text: str
) -> Iterator[TextSelections]:
    """Run the model on the batches, and yield the selections of each, in the layers of this stage.

    Collective as the methods of the model: every rank passes as many batches, and the ranks of tp
    and pp the same. The ranks of tp get the same selections.

    Args:
        model: that reads.
        batches: each with the number of its first sequence in the text. They have tokens and
            loss_mask [B, S], the sequences of one text in order. Tokens outside the loss mask are
            left out, but seen by the model.
        text: the name of the text.
    """
    found: list[LayerSelections] = []
    for first, batch in batches:
        found.clear()
        tokens_BS = batch["tokens"].to(model.device)
        with _tracing(model.chunk, found.append):
            model.losses(tokens_BS, tokens_BS)  # unlike logits, they need little memory
        yield _in_text_order(batch, text, first, found)


def _in_text_order(
    batch: Batch, text: str, first: int, found: list[LayerSelections]
) -> TextSelections:
    sequences, length = batch["tokens"].shape
    read_BS = batch["loss_mask"].numpy() > 0
    sequence_N, position_N = np.nonzero(read_BS)
    rows_N = position_N * sequences + sequence_N  # layers have [S, B]
    return TextSelections(
        text,
        (first + sequence_N).astype(np.int64),
        position_N.astype(np.int32),
        batch["tokens"].numpy()[read_BS],
        tuple(layer.of(rows_N) for layer in found),
    )


@dataclass(frozen=True)
class _TracedRule:
    """A rule that reports its choices."""

    rule: Rule
    layer: DispatchedLayer
    record: RecordSelections

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        choices = self.rule(scores_TE, tokens)
        self.record(_chosen(choices, tokens, self.layer))
        return choices

    def with_bias(self, bias_E: torch.Tensor) -> _TracedRule:
        return _TracedRule(cast(BiasedRule, self.rule).with_bias(bias_E), self.layer, self.record)


def _chosen(choices: Choices, tokens: Tokens, layer: DispatchedLayer) -> ChosenExperts:
    """Of the whole micro-batch, of which this rank may route a share."""
    capacity = layer.context.capacity
    dropped_T = choices.experts_TK.new_zeros(len(choices.experts_TK))
    if capacity is not None:
        lost_TK = (choices.experts_TK >= 0) & (capacity.keep(choices, tokens).experts_TK < 0)
        dropped_T = lost_TK.sum(dim=1)
    entropy_T = torch.special.entr(torch.softmax(choices.scores_TE.float(), dim=-1)).sum(dim=-1)
    dispatched = layer.dispatched(choices)

    def whole(x_TX: torch.Tensor) -> np.ndarray:
        return tokens.of_micro_batch(x_TX).cpu().numpy()

    return ChosenExperts(
        layer=layer.layer_number,
        entropy_T=whole(entropy_T[:, None])[:, 0],
        dropped_T=whole(dropped_T[:, None])[:, 0],
        experts_TK=whole(dispatched.experts_TK),
        probs_TK=whole(choices.probs_TK.float()),
        num_experts=layer.num_experts,
    )


def _merged(merges: Merges, layer: MergedLayer) -> MergedSelections:
    stretches, sequences, _ = merges.weights_MBE.shape
    weights_PE = merges.weights_MBE.detach().float().flatten(0, 1)
    stretch_S = np.repeat(np.arange(stretches), merges.sizes)
    merge_T = (stretch_S[:, None] * sequences + np.arange(sequences)).ravel()
    entropy_P = torch.special.entr(weights_PE).sum(dim=-1).cpu().numpy()
    return MergedSelections(
        layer=layer.layer_number,
        entropy_T=entropy_P[merge_T],
        dropped_T=np.zeros(len(merge_T), dtype=np.int64),
        weights_PE=weights_PE.cpu().numpy(),
        merge_T=merge_T,
    )


@contextmanager
def _tracing(model: Any, record: RecordSelections) -> Iterator[None]:
    """Inside, each layer with experts reports its selections. Restores the layers at the end."""
    layers = expert_layers(model)
    dispatched = [layer for layer in layers if isinstance(layer, DispatchedLayer)]
    merged = [layer for layer in layers if isinstance(layer, MergedLayer)]
    rules = [layer.evaluation_rule for layer in dispatched]
    for layer, rule in zip(dispatched, rules, strict=True):
        layer.evaluation_rule = _TracedRule(rule, layer, record)
    for each in merged:
        each.__dict__["merges"] = _traced_merges(each, record)
    try:
        yield
    finally:
        for layer, rule in zip(dispatched, rules, strict=True):
            layer.evaluation_rule = rule
        for each in merged:
            del each.__dict__["merges"]


def _traced_merges(
    layer: MergedLayer, record: RecordSelections
) -> Callable[[torch.Tensor], Merges]:
    original = layer.merges

    def merges(x_SBD: torch.Tensor) -> Merges:
        found = original(x_SBD)
        record(_merged(found, layer))
        return found

    return merges


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
