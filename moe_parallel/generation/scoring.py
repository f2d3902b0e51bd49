"""The likelihood of texts, in batches of similar length, divided over data-parallel ranks.

Shape suffixes: B sequences, S tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import torch
import torch.distributed as dist

from moe_parallel.config import Config
from moe_parallel.generation.language_model import GenerationModel
from moe_parallel.layers.past import Past

_T = TypeVar("_T")


@dataclass(frozen=True)
class Span:
    """A sequence, whose tokens from `first` on are scored, each after all tokens before it."""

    tokens: Sequence[int]
    first: int  # at least 1: no token precedes the first one
    prompt_length: int | None = None  # see `Past`

    @property
    def inputs(self) -> int:
        """The number of tokens that the model reads: all but the last."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Score:
    """The likelihood of a span."""

    nats: float  # the sum of -ln p
    is_greedy: bool | None = None  # whether each token is the most probable one; None: not asked


def score(
    model: GenerationModel,
    spans: Sequence[Span],
    batch_size: int,
    *,
    greedy: bool = False,
    advance: Callable[[int], object] = lambda count: None,
) -> list[Score]:
    """The scores of spans, the same on every rank. Collective over all ranks.

    Args:
        spans: the same on every rank.
        batch_size: sequences that a data-parallel rank computes at a time.
        greedy: whether to compare with the most probable tokens, which needs all logits of a batch.
        advance: called with the number of spans that this rank has scored.
    """
    of_batch = _with_greedy if greedy else _nats_only
    batches = list(batches_of(spans, batch_size, model.config))
    dp = model.groups.dp
    found: dict[int, Score] = {}
    # Ranks that share experts must make the same number of passes: some compute a batch twice.
    for first in range(0, len(batches), dp.size()):
        batch = batches[min(first + dp.rank(), len(batches) - 1)]
        for number, each in zip(batch, of_batch(model, [spans[i] for i in batch]), strict=True):
            found[number] = each
        advance(sum(map(len, batches[first : first + dp.size()])))
    everything = found if dp.size() == 1 else _gathered(found, dp)
    return [everything[number] for number in range(len(spans))]


def batches_of(spans: Sequence[Span], batch_size: int, config: Config) -> Iterator[list[int]]:
    """Numbers of spans that are computed together, the longest first.

    Shorter sequences are padded at their end, which changes no output before it: only a sequence
    that is settled (`Config.settled_after`) is batched with a longer one.
    """
    settled = config.settled_after

    def key(number: int) -> tuple[int, int, int]:
        span = spans[number]
        alone = number if config.instances_mix else 0
        if span.prompt_length is not None:  # its mean merges the experts: settled after it
            return 0, span.prompt_length, alone
        pads = settled is not None and span.inputs >= settled
        return 0 if pads else span.inputs, 0, alone

    numbers = sorted(range(len(spans)), key=lambda i: (key(i), -spans[i].inputs, i))
    groups = [list(group) for _, group in groupby(numbers, key)]
    groups.sort(key=lambda group: -spans[group[0]].inputs)
    for group in groups:
        for first in range(0, len(group), batch_size):
            yield group[first : first + batch_size]


def _padded(model: GenerationModel, spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels: int64 [B, S], filled up with zeros."""
    longest = max(span.inputs for span in spans)
    rows = [[*span.tokens, *[0] * (longest - span.inputs)] for span in spans]
    whole = torch.tensor(rows, device=model.device)
    return whole[:, :-1], whole[:, 1:]


def _nats_only(model: GenerationModel, spans: Sequence[Span]) -> list[Score]:
    tokens_BS, labels_BS = _padded(model, spans)
    losses_BS = model.losses(tokens_BS, labels_BS).double()
    return [
        Score(losses_S[span.first - 1 : span.inputs].sum().item())
        for span, losses_S in zip(spans, losses_BS, strict=True)
    ]


def _with_greedy(model: GenerationModel, spans: Sequence[Span]) -> list[Score]:
    tokens_BS, labels_BS = _padded(model, spans)
    prompt_length = spans[0].prompt_length
    past = None if prompt_length is None else Past(tokens_BS.shape[1], prompt_length)
    logits_BSV = model.logits(tokens_BS, past)
    scores = []
    for span, logits_SV, labels_S in zip(spans, logits_BSV, labels_BS, strict=True):
        places = slice(span.first - 1, span.inputs)
        logits_SV, labels_S = logits_SV[places], labels_S[places]
        chosen_S = logits_SV.gather(1, labels_S[:, None])[:, 0]
        nats = (logits_SV.logsumexp(1) - chosen_S).double().sum().item()
        scores.append(Score(nats, bool((logits_SV.argmax(1) == labels_S).all())))
    return scores


def _gathered(found: dict[int, _T], group: dist.ProcessGroup) -> dict[int, _T]:
    parts: list[dict[int, _T]] = [{} for _ in range(group.size())]
    dist.all_gather_object(parts, found, group=group)
    everything: dict[int, _T] = {}
    for part in parts:
        everything |= part
    return everything
