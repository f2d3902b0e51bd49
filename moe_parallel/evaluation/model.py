"""The losses of a model that is divided over ranks, and its scores of texts in batches.

Shape suffixes: B sequences, S tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from moe_parallel.config import Config
from moe_parallel.parallel import Groups


@dataclass(frozen=True)
class ReadingModel:
    """This rank's chunk of a model, one per pipeline stage, without sequence parallelism."""

    chunk: Any  # a LanguageModel, in evaluation mode
    groups: Groups
    config: Config
    vocab_size: int  # without padding

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.chunk.parameters()).device
        return device

    @torch.no_grad()
    def losses(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        """-ln p of each label, in nats: fp32 [B, S], on every rank. Never holds all logits.

        Padding of the vocabulary has probability 0. Collective over tp and pp, whose ranks pass the
        same tokens, and over the ranks that share the experts.
        """
        pp = self.groups.pp
        if pp.rank() > 0:
            shape = (tokens_BS.shape[1], len(tokens_BS), self.config.model.hidden_size)
            dtype = next(self.chunk.parameters()).dtype
            hidden_SBD = torch.empty(shape, dtype=dtype, device=self.device)
            dist.recv(hidden_SBD, group=pp, group_src=pp.rank() - 1)
            self.chunk.set_input_tensor(hidden_SBD)
        positions_BS = torch.arange(tokens_BS.shape[1], device=self.device).expand_as(tokens_BS)
        self.chunk.vocab_size_of_losses = self.vocab_size
        try:
            output: torch.Tensor = self.chunk(tokens_BS, positions_BS, None, labels=labels_BS)
        finally:
            self.chunk.vocab_size_of_losses = None
        if pp.rank() < pp.size() - 1:
            dist.send(output.contiguous(), group=pp, group_dst=pp.rank() + 1)
            output = torch.empty(tokens_BS.shape, device=self.device)
        output = output.float().contiguous()
        if pp.size() > 1:
            dist.broadcast(output, group=pp, group_src=pp.size() - 1)
        return output


@dataclass(frozen=True)
class Span:
    """A sequence, whose tokens from `first` on are scored, each after all tokens before it."""

    tokens: Sequence[int]
    first: int  # at least 1: no token precedes the first one

    @property
    def inputs(self) -> int:
        """The number of tokens that the model reads: all but the last."""
        return len(self.tokens) - 1


def score(
    model: ReadingModel,
    spans: Sequence[Span],
    batch_size: int,
    advance: Callable[[int], object] = lambda count: None,
) -> list[float]:
    """The sum of -ln p of each span, the same on every rank. Collective over all ranks.

    Args:
        spans: the same on every rank.
        batch_size: sequences that a data-parallel rank computes at a time.
        advance: called with the number of spans that were scored.
    """
    batches = list(batches_of(spans, batch_size, model.config))
    dp = model.groups.dp
    found: dict[int, float] = {}
    # Ranks that share experts must make the same number of passes: some compute a batch twice.
    for first in range(0, len(batches), dp.size()):
        batch = batches[min(first + dp.rank(), len(batches) - 1)]
        found |= zip(batch, _nats(model, [spans[i] for i in batch]), strict=True)
        advance(sum(map(len, batches[first : first + dp.size()])))
    parts = [found]
    if dp.size() > 1:
        parts = [{} for _ in range(dp.size())]
        dist.all_gather_object(parts, found, group=dp)
    everything = {number: nats for part in parts for number, nats in part.items()}
    return [everything[number] for number in range(len(spans))]


def batches_of(spans: Sequence[Span], batch_size: int, config: Config) -> Iterator[list[int]]:
    """Numbers of spans that are computed together, the longest first.

    Shorter sequences are padded at their end, which changes no output before it: only a sequence
    that is settled (`Config.settled_after`) is batched with a longer one.
    """
    settled = config.settled_after

    def key(number: int) -> tuple[int, int]:
        inputs = spans[number].inputs
        pads = settled is not None and inputs >= settled
        return 0 if pads else inputs, number if config.instances_mix else 0

    numbers = sorted(range(len(spans)), key=lambda i: (key(i), -spans[i].inputs, i))
    groups = [list(group) for _, group in groupby(numbers, key)]
    groups.sort(key=lambda group: -spans[group[0]].inputs)
    for group in groups:
        for first in range(0, len(group), batch_size):
            yield group[first : first + batch_size]


def _nats(model: ReadingModel, spans: Sequence[Span]) -> list[float]:
    longest = max(span.inputs for span in spans)
    rows = [[*span.tokens, *[0] * (longest - span.inputs)] for span in spans]
    whole = torch.tensor(rows, device=model.device)
    losses_BS = model.losses(whole[:, :-1], whole[:, 1:]).double()
    return [
        losses_S[span.first - 1 : span.inputs].sum().item()
        for span, losses_S in zip(spans, losses_BS, strict=True)
    ]
