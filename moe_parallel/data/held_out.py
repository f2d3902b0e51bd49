"""The held-out documents of a domain, as token ids."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset

from moe_parallel.data.sources import Source


def held_out_documents(source: Source, end_of_document: int) -> Iterator[list[int]]:
    """The tokens of each document in the validation part of a source, without its end.

    They are those of `Datasets.valid`, in the order of the file. An empty document is left out.
    """
    dataset = IndexedDataset(source.valid_prefix)
    for number in range(*_part(source, len(dataset.document_indices) - 1)):
        first, last = dataset.document_indices[number : number + 2]
        ids = np.concatenate([dataset[i] for i in range(first, last)])
        ids = ids[ids != end_of_document]
        if len(ids):
            yield ids.tolist()


def _part(source: Source, documents: int) -> tuple[int, int]:
    """The first document of the validation part, and the one after its last."""
    if source.split is None:
        return 0, documents
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(source.split))
    if matrix[1] is None:
        return 0, 0
    first, last = (round(fraction * documents) for fraction in matrix[1])
    return first, last
