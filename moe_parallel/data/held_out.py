"""The held-out documents of a domain, as token ids."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from moe_parallel.data.datasets import check_tokenizer, documents_of
from moe_parallel.data.indexed import check_indexed
from moe_parallel.data.sources import Source
from moe_parallel.data.tokenizer import Tokenizer


def held_out_documents(source: Source, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The tokens of each document in the validation part of a source, without its end.

    They are those of `Datasets.valid`, in the order of the file. An empty document is left out.

    Raises InputError for data of another tokenizer, and for files as in check_indexed.
    """
    check_tokenizer(source.valid_prefix, tokenizer)
    check_indexed(source.valid_prefix, tokenizer.vocab_size)
    dataset = IndexedDataset(source.valid_prefix)
    chosen_D = documents_of(source, len(dataset.document_indices) - 1)[-1]
    for number in () if chosen_D is None else np.flatnonzero(chosen_D):
        first, last = dataset.document_indices[number : number + 2]
        ids = np.concatenate([dataset[i] for i in range(first, last)])
        ids = ids[ids != tokenizer.eod]
        if len(ids):
            yield ids.tolist()
