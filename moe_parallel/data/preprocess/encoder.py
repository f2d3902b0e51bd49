"""Tokenizes a batch of records."""

from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from moe_parallel.data.indexed import Size, id_type
from moe_parallel.data.preprocess.batches import RawBatch
from moe_parallel.data.preprocess.records import Bad, Columns
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.errors import InputError


@dataclass
class EncodedDocuments:
    """The documents of a batch under one key: int32 lengths [N], and the ids of all of them [T].

    EncodedDocuments without a token are left out and counted as `empty`.
    """

    lengths_N: np.ndarray
    ids_T: np.ndarray
    domains: dict[str, Size]
    empty: int


@dataclass
class Encoded:
    """The result of a batch: documents for each of `Columns.texts`, and the unusable records."""

    documents: list[EncodedDocuments]
    bad: list[Bad] = field(default_factory=list)


class Encoder:
    """From a batch of records to token ids."""

    def __init__(self, tokenizer: Tokenizer, columns: Columns, append_eod: bool) -> None:
        self._tokenizer = tokenizer
        self._columns = columns
        self._ending = [tokenizer.eod] if append_eod else []
        self._dtype = id_type(tokenizer.vocab_size)

    def __call__(self, batch: RawBatch) -> Encoded:
        texts: list[list[str]] = [[] for _ in self._columns.texts]
        domains: list[str] = []
        bad: list[Bad] = []
        for record in batch.records(self._columns):
            if isinstance(record, Bad):
                bad.append(record)
                continue
            try:
                for text in record.texts:
                    self._tokenizer.check(text)
            except InputError as error:
                bad.append(Bad(record.number, str(error)))
                continue
            domains.append(record.domain)
            for column, text in zip(texts, record.texts, strict=True):
                column.append(text)
        return Encoded([self._documents(column, domains) for column in texts], bad)

    def _documents(self, texts: list[str], domains: list[str]) -> EncodedDocuments:
        all_ids = self._tokenizer.tokenize_all(texts)
        kept = [ids + self._ending for ids in all_ids if ids]
        sizes: dict[str, Size] = {}
        for ids, domain in zip(all_ids, domains, strict=True):
            if ids:
                size = sizes.get(domain, Size(0, 0))
                tokens = size.tokens + len(ids) + len(self._ending)
                sizes[domain] = Size(size.documents + 1, tokens)
        lengths_N = np.array([len(ids) for ids in kept], dtype=np.int32)
        ids_T = np.fromiter(chain.from_iterable(kept), self._dtype, int(lengths_N.sum()))
        return EncodedDocuments(lengths_N, ids_T, sizes, len(texts) - len(kept))
