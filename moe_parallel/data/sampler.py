"""Batches for each data-parallel rank, cut from one stream of samples.

The stream does not depend on the layout: samples are taken in order, one micro-batch for each
data-parallel rank in turn, as in Megatron's MegatronPretrainingSampler. So a global batch contains
the same samples for every number of ranks and every micro-batch size, and training continues under
any layout from the number of samples consumed.
"""

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


def evaluation_sizes(count: int, micro_batch_size: int, data_parallel_size: int) -> list[int]:
    """The sizes of the micro-batches of an evaluation of `count` samples, those of all ranks alike.

    No micro-batch has both samples and padding, so routing that is counted by micro-batches leaves
    padding out: the last samples are dealt in smaller micro-batches, in the end one a rank.
    """
    whole, rest = divmod(count, micro_batch_size * data_parallel_size)
    even, odd = divmod(rest, data_parallel_size)
    return [micro_batch_size] * whole + [even] * (even > 0) + [1] * (odd > 0)


def evaluation_batches(
    dataset: Any,
    *,
    samples: int | None = None,
    sizes: Sequence[int],
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[NamedTensors]:
    """Samples 0 to samples - 1, once each, distributed over the ranks; by default all samples.

    Every rank yields a micro-batch of each of the `sizes`, because the model contains collectives.
    Places after the last sample contain sample 0 with a loss mask of zeros.
    """
    count, first = sample_count(dataset, samples), 0
    for size in sizes:
        places = range(first + data_parallel_rank * size, first + (data_parallel_rank + 1) * size)
        yield _stack([dataset[i] if i < count else _masked(dataset[0]) for i in places])
        first += size * data_parallel_size


def sample_count(dataset: Any, samples: int | None) -> int:
    """The number of samples that an evaluation of `samples` reads; None: of all."""
    return len(dataset) if samples is None else min(samples, len(dataset))


def _masked(sample: NamedTensors) -> NamedTensors:
    return {**sample, "loss_mask": torch.zeros_like(sample["loss_mask"])}


def _stack(samples: Sequence[NamedTensors]) -> NamedTensors:
    return {field: torch.stack([sample[field] for sample in samples]) for field in _FIELDS}
