"""Loss and bits per byte on held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

import torch
import torch.distributed as dist

from moe_parallel.config import TrainingConfig
from moe_parallel.data.sampler import evaluation_batches, evaluation_sizes, sample_count
from moe_parallel.model.forward import Batch, Reported, run_micro_batches
from moe_parallel.parallel import Groups
from moe_parallel.telemetry.statistics import RoutingStatistics


@dataclass(frozen=True)
class TextLoss:
    """The loss of a model on a text."""

    nats: float  # the sum of -ln p over all tokens
    tokens: int
    num_bytes: int  # UTF-8 bytes that the tokens stand for
    later: TextLoss | None = None  # only of the tokens after the first part of each sequence

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / max(self.tokens, 1)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte. It can be compared across tokenizers that know the exact bytes of a token.

        A token that ends a document costs nats and stands for no byte.
        """
        return self.nats / math.log(2) / max(self.num_bytes, 1)


@torch.no_grad()
def measure_text_loss(
    chunks: list[Any],
    dataset: Any,
    bytes_per_token_V: torch.Tensor,
    training: TrainingConfig,
    groups: Groups,
    samples: int | None = None,
    first_part: int | None = None,
    statistics: RoutingStatistics | None = None,
) -> TextLoss:
    """Evaluate the model on the first `samples` samples of a dataset (None: on all). Collective.

    The result is the same on every rank. Without a capacity factor it does not depend on the
    layout. With one, evaluation drops choices as training does.

    Args:
        chunks: this rank's model chunks; left in evaluation mode.
        dataset: the samples, in the form that `data.sampler.evaluation_batches` accepts.
        bytes_per_token_V: int64, UTF-8 bytes of each token, on the device of the model.
        training: the sizes of a micro-batch.
        groups: the layout.
        samples: the number of samples; the same on every rank.
        first_part: the number of first tokens of a sequence that `later` omits; None: no `later`.
        statistics: of the model, to count the samples alone and no padding; None: nobody reads it.
    """

    def count(losses_BS: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Reported]:
        mask_BS = batch["loss_mask"].double()
        bytes_BS = bytes_per_token_V[batch["labels"]]
        counted_3BS = torch.stack([losses_BS * mask_BS, mask_BS, bytes_BS * mask_BS])
        later_3BS = counted_3BS
        if first_part is not None:
            later_3BS = counted_3BS * (batch["positions"] >= first_part)
        sums = torch.cat([counted_3BS.sum((1, 2)), later_3BS.sum((1, 2))])
        return losses_BS.mean(), {"sums": sums}

    for chunk in chunks:
        chunk.eval()
    dp = groups.dp
    count_of_samples = sample_count(dataset, samples)
    sizes = evaluation_sizes(count_of_samples, training.micro_batch_size, dp.size())
    stream = evaluation_batches(
        dataset,
        samples=samples,
        sizes=sizes,
        data_parallel_rank=dp.rank(),
        data_parallel_size=dp.size(),
    )
    reported: list[Reported] = []
    for size, equal in groupby(sizes):
        steps = rounds = len(list(equal))
        if len(chunks) > 1:  # the interleaved schedule needs complete rounds of the pipeline
            steps = -(-rounds // groups.pp.size()) * groups.pp.size()
        reported += run_micro_batches(
            chunks,
            _padded(islice(stream, rounds)),
            replace(training, micro_batch_size=size),
            steps,
            count,
            forward_only=True,
            cp=groups.cp,
            statistics=statistics,
        )
    total = torch.zeros(6, dtype=torch.float64, device=bytes_per_token_V.device)
    if reported and groups.tp.rank() == 0:  # tensor-parallel ranks report the same tokens
        total += torch.stack([report["sums"] for report in reported]).sum(0)
    dist.all_reduce(total)
    whole, later = (_text_loss(*sums) for sums in total.view(2, 3).tolist())
    return whole if first_part is None else replace(whole, later=later)


def _text_loss(nats: float, tokens: float, num_bytes: float) -> TextLoss:
    return TextLoss(nats, round(tokens), round(num_bytes))


def _padded(stream: Iterator[Batch]) -> Iterator[Batch]:
    """The stream, then its last batch again and again with an empty loss mask."""
    batch: Batch = {}
    for batch in stream:
        yield batch
    masked = {**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])}
    while True:
        yield masked
