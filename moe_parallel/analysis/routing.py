"""What a trained model selects on texts: totals, a test of specialization, and their files.

FOLDER/analysis.json         what was analyzed, and how
FOLDER/NAME.parquet          tables:
    loads                    text, layer, expert, tokens (choices, or sums of merge weights), share
    layers                   text, layer, tokens, experts_per_token, ent_load, ent_conf (nats),
                             dropped (choices)
    pairs                    layer, expert, other, tokens that use both; expert <= other
    specialization           layer (null: mean over layers), mutual_information, by_chance (nats), p
    vocabulary               token, text, occurrences, experts_per_token, the most experts first
FOLDER/selections.parquet    a row for each token and layer: text, sample, position, token, layer,
                             experts and weights (the best first), dropped, entropy (nats)
FOLDER/view.parquet          the first tokens of each text, to be read: text, sample, position,
                             token, piece, and by layer best (expert, -1: none) and used (experts)

**Specialization.** I(expert; text) is that of a choice drawn at random, in nats. All texts are
equally likely; within a text the probability of an expert is its share of the choices (of merged
experts, its weight). It is 0 if all texts use the experts alike, and at most ln of the number of
texts. With few tokens it is above 0 by chance. The test says by how much: it gives the texts'
labels to other sequences, as many to each text as before, and computes the same number again.
Tokens of a sequence are alike, so labels are permuted over blocks of whole sequences. The number of
blocks is bounded: when there are too many, neighbors of one text are joined in pairs.

Shape suffixes: T tokens, A texts, G layers with experts, E experts, V vocabulary, N blocks,
X = G * E.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_parallel.analysis.selections import TextSelections
from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional
from moe_parallel.reading import open_regular, parse_json, read_small, rows_at_a_time

ANALYSIS_MANIFEST = "analysis.json"
SELECTIONS, VIEW = "selections", "view"
MOST_BLOCKS, FEWEST_BLOCKS, MOST_BLOCK_BYTES = 2048, 64, 64 * 2**20
ROWS_OF_A_GROUP = 500_000  # collected before they are written, which bounds the memory
_MOST_BYTES = 1 << 30  # of a table that is read

TableColumns = dict[str, Any]


class Blocks:
    """Choices of each expert in runs of consecutive sequences of one text."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        size = 8 * num_layers * num_experts
        self._most = max(FEWEST_BLOCKS, min(MOST_BLOCKS, MOST_BLOCK_BYTES // size))
        self._shape = (num_layers, num_experts)
        self.sequences = 1  # of a block; the last of a text may have fewer
        self._counts: dict[str, list[np.ndarray]] = {}
        self._last: dict[str, int] = {}  # the block of the last sequence of each text

    def add(self, text: str, sample: int, counts_GE: np.ndarray) -> None:
        """Add (a part of) the sequence with the number `sample`; numbers of a text ascend."""
        counts = self._counts.setdefault(text, [])
        block = sample // self.sequences
        if counts and self._last[text] == block:
            counts[-1] += counts_GE
            return
        counts.append(counts_GE.astype(np.float64))
        self._last[text] = block
        if sum(map(len, self._counts.values())) > self._most:
            self.sequences *= 2
            for name, its in self._counts.items():
                pairs = [its[place : place + 2] for place in range(0, len(its), 2)]
                self._counts[name] = [sum(pair[1:], pair[0]) for pair in pairs]
                self._last[name] //= 2

    def arrays(self) -> tuple[list[str], np.ndarray, np.ndarray]:
        """(texts, label of each block [N], counts [N, G, E])."""
        texts = list(self._counts)
        labels_N = np.repeat(np.arange(len(texts)), [len(self._counts[text]) for text in texts])
        counts = [each for text in texts for each in self._counts[text]]
        return texts, labels_N, np.array(counts).reshape(-1, *self._shape)


@dataclass(frozen=True)
class Specialization:
    """The result of the test for one layer, or for the mean over layers (`layer` is None)."""

    layer: int | None
    mutual_information: float  # nats
    by_chance: float  # mean over permutations
    p: float  # share of permutations, the actual labels included, with at least as much


def mutual_information(counts_AGE: np.ndarray) -> np.ndarray:
    """I(expert; text) of each layer, in nats: [..., G] from counts [..., A, G, E]."""
    totals = counts_AGE.sum(axis=-1, keepdims=True)
    of_text = counts_AGE / np.where(totals > 0, totals, 1)
    mean = of_text.mean(axis=-3, keepdims=True)
    ratio = np.divide(of_text, mean, where=of_text > 0, out=np.ones_like(of_text))
    return np.asarray((of_text * np.log(ratio)).sum(axis=-1).mean(axis=-2))


def specialization(
    blocks: Blocks, layers: Sequence[int], permutations: int, seed: int
) -> list[Specialization]:
    """The test of each layer, and of the mean over layers at the end; [] for a single text.

    Args:
        layers: the numbers of the layers.
        permutations: the p value is at least 1 / (permutations + 1).
    """
    texts, labels_N, counts_NGE = blocks.arrays()
    if len(texts) < 2:
        return []
    flat_NX = counts_NGE.reshape(len(counts_NGE), -1)

    def measured(labels: np.ndarray) -> np.ndarray:
        members_AN = labels[None] == np.arange(len(texts))[:, None]
        counts_AX = members_AN.astype(np.float64) @ flat_NX
        values_G = mutual_information(counts_AX.reshape(len(texts), *counts_NGE.shape[1:]))
        return np.append(values_G, values_G.mean())

    actual = measured(labels_N)
    generator = np.random.default_rng(seed)
    total, reached = np.zeros_like(actual), np.ones_like(actual)
    for _ in range(permutations):
        values = measured(generator.permutation(labels_N))
        total += values
        # Values that differ only by rounding count as equal.
        reached += values >= actual * (1 - 1e-12)
    found = np.stack([actual, total / permutations, reached / (permutations + 1)], axis=1)
    return [
        Specialization(layer, *row)
        for layer, row in zip([*layers, None], found.tolist(), strict=True)
    ]


@dataclass
class TextTotals:
    """The sums of one text. `shares_GE`: choices, or weights of merged experts."""

    shares_GE: np.ndarray
    experts_G: np.ndarray  # used by the tokens
    entropy_G: np.ndarray
    dropped_G: np.ndarray
    tokens: int = 0

    def load_GE(self) -> np.ndarray:
        """The share of each expert in the choices (weights) of its layer."""
        totals_G1 = self.shares_GE.sum(axis=1, keepdims=True)
        return self.shares_GE / np.where(totals_G1 > 0, totals_G1, 1)

    def ent_load_G(self) -> np.ndarray:
        """Entropy of the load, in nats. [Eq. 7 of AoE]"""
        load_GE = self.load_GE()
        return -(load_GE * np.log(np.where(load_GE > 0, load_GE, 1))).sum(axis=1)

    def mean_G(self, sums_G: np.ndarray) -> np.ndarray:
        """Per token."""
        return sums_G / max(1, self.tokens)


class AnalysisTotals:
    """All totals of an analysis. Their size does not grow with the tokens.

    `pieces_V`: the text of each item of the vocabulary by itself. `tokens_V`, `experts_V`: its
    occurrences, and the experts of these together, mean over layers. `pairs_GEE[g, i, j]`: tokens
    that use both experts i and j of a layer; i = j: that use i.
    """

    def __init__(self, layers: Sequence[int], num_experts: int, pieces_V: Sequence[str]) -> None:
        self.layers, self.num_experts, self.pieces_V = layers, num_experts, pieces_V
        self.texts: dict[str, TextTotals] = {}
        self.tokens_V = np.zeros(len(pieces_V), dtype=np.int64)
        self.experts_V = np.zeros(len(pieces_V))
        self.pairs_GEE = np.zeros((len(layers), num_experts, num_experts), dtype=np.int64)
        self.blocks = Blocks(len(layers), num_experts)

    @property
    def tokens(self) -> int:
        return sum(totals.tokens for totals in self.texts.values())

    def add(self, selections: TextSelections) -> None:
        """Add some tokens. The sequences of a text come in ascending order."""
        layers, experts = len(self.layers), self.num_experts
        if selections.text not in self.texts:
            experts_G, entropy_G, dropped_G = np.zeros((3, layers))
            zeros = TextTotals(np.zeros((layers, experts)), experts_G, entropy_G, dropped_G)
            self.texts[selections.text] = zeros
        totals = self.texts[selections.text]
        totals.tokens += len(selections)
        used_T = np.zeros(len(selections))
        for place, layer in enumerate(selections.layers):
            active_TE = layer.active_TE
            count_T = active_TE.sum(axis=1)
            used_T += count_T
            totals.experts_G[place] += count_T.sum()
            totals.entropy_G[place] += layer.entropy_T.sum(dtype=np.float64)
            totals.dropped_G[place] += layer.dropped_T.sum()
            ones_TE = active_TE.astype(np.float32)  # exact up to 2^24 tokens
            self.pairs_GEE[place] += (ones_TE.T @ ones_TE).astype(np.int64)
        edges = np.flatnonzero(np.diff(selections.sample_T)) + 1
        for rows_N in np.split(np.arange(len(selections)), edges):  # of a sequence
            if len(rows_N):
                shares = [layer.of(rows_N).shares_E() for layer in selections.layers]
                shares_GE = np.stack(shares) if shares else np.zeros((0, experts))
                totals.shares_GE += shares_GE
                self.blocks.add(selections.text, int(selections.sample_T[rows_N[0]]), shares_GE)
        size, token_T = len(self.pieces_V), selections.token_T
        self.tokens_V += np.bincount(token_T, minlength=size)
        self.experts_V += np.bincount(token_T, weights=used_T / max(1, layers), minlength=size)


def tables_of(totals: AnalysisTotals, tests: Sequence[Specialization]) -> dict[str, TableColumns]:
    """The tables by name, as columns of Python and numpy values."""
    layers, experts = np.array(totals.layers, dtype=np.int16), totals.num_experts
    texts, names = list(totals.texts.values()), list(totals.texts)
    one_N, other_N = np.triu_indices(experts)
    items = np.flatnonzero(totals.tokens_V)
    means = totals.experts_V[items] / totals.tokens_V[items]
    ranked = np.lexsort((items, -means))
    items, means = items[ranked], means[ranked]

    def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts) if parts else np.zeros(0)

    return {
        "loads": {
            "text": [name for name in names for _ in range(len(layers) * experts)],
            "layer": np.tile(np.repeat(layers, experts), len(texts)),
            "expert": np.tile(np.arange(experts, dtype=np.int16), len(layers) * len(texts)),
            "tokens": joined([text.shares_GE.ravel() for text in texts]),
            "share": joined([text.load_GE().ravel() for text in texts]),
        },
        "layers": {
            "text": [name for name in names for _ in layers],
            "layer": np.tile(layers, len(texts)),
            "tokens": [text.tokens for text in texts for _ in layers],
            "experts_per_token": joined([text.mean_G(text.experts_G) for text in texts]),
            "ent_load": joined([text.ent_load_G() for text in texts]),
            "ent_conf": joined([text.mean_G(text.entropy_G) for text in texts]),
            "dropped": joined([text.dropped_G for text in texts]).astype(np.int64),
        },
        "pairs": {
            "layer": np.repeat(layers, len(one_N)),
            "expert": np.tile(one_N.astype(np.int16), len(layers)),
            "other": np.tile(other_N.astype(np.int16), len(layers)),
            "tokens": totals.pairs_GEE[:, one_N, other_N].ravel(),
        },
        "specialization": {
            name: [asdict(test)[name] for test in tests]
            for name in ("layer", "mutual_information", "by_chance", "p")
        },
        "vocabulary": {
            "token": items,
            "text": [totals.pieces_V[item] for item in items.tolist()],
            "occurrences": totals.tokens_V[items],
            "experts_per_token": means,
        },
    }


class View:
    """Keeps the first tokens of each text, to be read."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.columns: dict[str, list[Any]] = {
            name: [] for name in ("text", "sample", "position", "token", "best", "used")
        }

    def add(self, selections: TextSelections) -> None:
        kept = self.columns["text"].count(selections.text)
        rows_N = np.arange(min(len(selections), self._most - kept))
        if not len(rows_N):
            return
        layers = [layer.of(rows_N) for layer in selections.layers]
        best_NG = np.stack([layer.best_T() for layer in layers], axis=1)
        used_NG = np.stack([layer.active_TE.sum(axis=1) for layer in layers], axis=1)
        added = {
            "text": [selections.text] * len(rows_N),
            "sample": selections.sample_T[rows_N].tolist(),
            "position": selections.position_T[rows_N].tolist(),
            "token": selections.token_T[rows_N].tolist(),
            "best": best_NG.astype(np.int16).tolist(),
            "used": used_NG.astype(np.int16).tolist(),
        }
        for name, values in added.items():
            self.columns[name] += values


class SelectionsFile:
    """Writes selections.parquet while a model reads texts; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._pa, parquet = _pyarrow()
        pa = self._pa
        self._schema = pa.schema(
            {
                "text": pa.dictionary(pa.int16(), pa.string()),
                "sample": pa.int32(),
                "position": pa.int32(),
                "token": pa.int32(),
                "layer": pa.int16(),
                "experts": pa.list_(pa.int16()),
                "weights": pa.list_(pa.float32()),
                "dropped": pa.int16(),
                "entropy": pa.float32(),
            }
        )
        path = folder / f"{SELECTIONS}.parquet"
        self._writer = parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._waiting: list[Any] = []
        self._rows = 0

    def add(self, selections: TextSelections) -> None:
        pa, count = self._pa, len(selections)
        for layer in selections.layers:
            used_T, experts, weights = layer.slots()
            offsets = pa.array(np.append(0, np.cumsum(used_T)).astype(np.int32))
            text = pa.array(np.zeros(count, dtype=np.int16))
            columns = [
                pa.DictionaryArray.from_arrays(text, [selections.text]),
                pa.array(selections.sample_T.astype(np.int32)),
                pa.array(selections.position_T.astype(np.int32)),
                pa.array(selections.token_T.astype(np.int32)),
                pa.array(np.full(count, layer.layer, dtype=np.int16)),
                pa.ListArray.from_arrays(offsets, pa.array(experts.astype(np.int16))),
                pa.ListArray.from_arrays(offsets, pa.array(weights.astype(np.float32))),
                pa.array(layer.dropped_T.astype(np.int16)),
                pa.array(layer.entropy_T.astype(np.float32)),
            ]
            self._waiting.append(pa.RecordBatch.from_arrays(columns, schema=self._schema))
            self._rows += count
        if self._rows >= ROWS_OF_A_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            table = self._pa.Table.from_batches(self._waiting).unify_dictionaries()
            self._writer.write_table(table, row_group_size=self._rows)
        self._waiting, self._rows = [], 0

    def __enter__(self) -> SelectionsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._flush()
        self._writer.close()


def write_tables(folder: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Write each table to a Parquet file. Raises InputError without pyarrow, and OSError."""
    pa, parquet = _pyarrow()
    for name, columns in tables.items():
        parquet.write_table(pa.table(dict(columns)), folder / f"{name}.parquet", compression="zstd")


def write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    (folder / ANALYSIS_MANIFEST).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def read_facts(folder: Path) -> dict[str, Any]:
    """analysis.json. Raises InputError if it cannot be read."""
    path = folder / ANALYSIS_MANIFEST
    try:
        facts = parse_json(read_small(path))
    except (OSError, ValueError):
        facts = None
    if not isinstance(facts, dict):
        raise InputError(f"{path} cannot be read: repeat the analysis (tools/analyze.py)")
    return facts


def read_table(folder: Path, name: str) -> TableColumns:
    """The columns of a table. Raises InputError if it is missing or damaged."""
    pa, parquet = _pyarrow()
    path = folder / f"{name}.parquet"
    kept: list[Any] = []
    size = 0
    try:
        with open_regular(path) as file:
            opened = parquet.ParquetFile(file)
            for batch in opened.iter_batches(rows_at_a_time(opened.metadata)):
                size += batch.nbytes + 8 * batch.num_rows * batch.num_columns
                if size > _MOST_BYTES:
                    raise OSError("it unfolds to gigabytes")
                kept.append(batch)
            return dict(pa.Table.from_batches(kept, opened.schema_arrow).to_pydict())
    except (OSError, pa.ArrowException):
        raise InputError(
            f"{path} is missing or damaged: repeat the analysis (tools/analyze.py)"
        ) from None


def _pyarrow() -> tuple[Any, Any]:
    wanted_by = "an analysis in Parquet"
    return import_optional("pyarrow", wanted_by), import_optional("pyarrow.parquet", wanted_by)
