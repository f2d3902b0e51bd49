"""Batches for each data-parallel rank, cut from one stream of samples.

The stream does not know the layout: samples are taken in order, a micro-batch for each
data-parallel rank in turn, as Megatron's MegatronPretrainingSampler does. So a global batch holds
the same samples whatever the number of ranks and the size of micro-batches, and training goes on
under any layout from the number of samples consumed.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

Batch = dict[str, torch.Tensor]

_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


def batches(
    dataset: Any,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[Batch]:
    """Micro-batches of this rank, from the sample after the last one consumed by all ranks.

    Args:
        dataset: samples are dicts of tensors [s]: tokens, labels, position_ids (int64),
            loss_mask (float32).
        consumed_samples: samples that all ranks together have taken before.
        micro_batch_size: b below.
        data_parallel_rank: whose micro-batches these are.
        data_parallel_size: number of ranks that share the stream.

    Yields:
        dicts of CPU tensors [b, s] with those four names. Ends before an incomplete round.
    """
    stride = micro_batch_size * data_parallel_size
    for start in range(consumed_samples, len(dataset) - stride + 1, stride):
        first = start + data_parallel_rank * micro_batch_size
        yield _stack([dataset[i] for i in range(first, first + micro_batch_size)])


def evaluation_batches(
    dataset: Any,
    *,
    samples: int | None = None,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[Batch]:
    """Samples 0 .. samples-1 (default, and at most: all) once, shared out among the ranks.

    Every rank yields evaluation_steps(...) batches, as collectives in the model need. Places past
    the last sample hold sample 0 with a loss mask of zeros.
    """
    count = _count(dataset, samples)
    steps = evaluation_steps(
        dataset,
        samples=samples,
        micro_batch_size=micro_batch_size,
        data_parallel_size=data_parallel_size,
    )
    for step in range(steps):
        first = (step * data_parallel_size + data_parallel_rank) * micro_batch_size
        places = range(first, first + micro_batch_size)
        yield _stack([dataset[i] if i < count else _masked(dataset[0]) for i in places])


def evaluation_steps(
    dataset: Any, *, samples: int | None = None, micro_batch_size: int, data_parallel_size: int
) -> int:
    """Number of batches that evaluation_batches yields on each rank."""
    return math.ceil(_count(dataset, samples) / (micro_batch_size * data_parallel_size))


def _count(dataset: Any, samples: int | None) -> int:
    return len(dataset) if samples is None else min(samples, len(dataset))


def _masked(sample: Batch) -> Batch:
    return {**sample, "loss_mask": torch.zeros_like(sample["loss_mask"])}


def _stack(samples: Sequence[Batch]) -> Batch:
    return {field: torch.stack([sample[field] for sample in samples]) for field in _FIELDS}
