"""Batches for each data-parallel rank, cut from one stream of samples.

The stream does not depend on the layout: samples are taken in order, one micro-batch for each
data-parallel rank in turn, as in Megatron's MegatronPretrainingSampler. So a global batch contains
the same samples for every number of ranks and every micro-batch size, and training continues under
any layout from the number of samples consumed.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

NamedTensors = dict[str, torch.Tensor]

_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


def batches(
    dataset: Any,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[NamedTensors]:
    """Micro-batches of this rank, starting after the samples that all ranks have consumed.

    Args:
        dataset: samples are dicts of tensors [s]: tokens, labels, position_ids (int64),
            loss_mask (float32).
        consumed_samples: samples that all ranks together have used before.
        micro_batch_size: b below.
        data_parallel_rank: the rank that gets these micro-batches.
        data_parallel_size: number of ranks that share the stream.

    Yields:
        Dicts of CPU tensors [b, s] with those four names. Ends before an incomplete round.
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
) -> Iterator[NamedTensors]:
    """Samples 0 to samples - 1, once each, distributed over the ranks; by default all samples.

    Every rank yields evaluation_steps(...) batches, because the model contains collectives. Places
    after the last sample contain sample 0 with a loss mask of zeros.
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
    """The number of batches that evaluation_batches yields on each rank."""
    return math.ceil(_count(dataset, samples) / (micro_batch_size * data_parallel_size))


def _count(dataset: Any, samples: int | None) -> int:
    return len(dataset) if samples is None else min(samples, len(dataset))


def _masked(sample: NamedTensors) -> NamedTensors:
    return {**sample, "loss_mask": torch.zeros_like(sample["loss_mask"])}


def _stack(samples: Sequence[NamedTensors]) -> NamedTensors:
    return {field: torch.stack([sample[field] for sample in samples]) for field in _FIELDS}
