"""The folder of an analysis.

FOLDER/analysis.json         what was analyzed, and how
FOLDER/NAME.parquet          the tables of tables.py
FOLDER/selections.parquet    a row for each token and layer: text, sample, position, token, layer,
                             experts and weights (the best first), dropped, entropy (nats)
FOLDER/view.parquet          the first tokens of each text, to be read: text, sample, position,
                             token, piece, and by layer best (expert, -1: none) and used (experts)

Parquet is written and read through pyarrow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from moe_parallel.analysis.routing.selections import TextSelections
from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional
from moe_parallel.reading import open_regular, parse_json, read_small, rows_at_a_time

ANALYSIS_MANIFEST = "analysis.json"
SELECTIONS, VIEW = "selections", "view"

_MOST_BYTES = 1 << 30  # of a table that is read

#: Rows that are collected before they are written, which bounds the memory.
ROWS_OF_A_GROUP = 500_000


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


def read_table(folder: Path, name: str) -> dict[str, Any]:
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
        pa = self._pa
        count = len(selections)
        for layer in selections.layers:
            used_T, experts, weights = layer.slots()
            offsets = pa.array(np.append(0, np.cumsum(used_T)).astype(np.int32))
            text = pa.DictionaryArray.from_arrays(
                pa.array(np.zeros(count, dtype=np.int16)), [selections.text]
            )
            columns = [
                text,
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._flush()
        self._writer.close()


class View:
    """Keeps the first tokens of each text, to be read."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[str, int] = {}
        self.columns: dict[str, list[Any]] = {
            name: [] for name in ("text", "sample", "position", "token", "best", "used")
        }

    def add(self, selections: TextSelections) -> None:
        kept = self._kept.get(selections.text, 0)
        rows_N = np.arange(min(len(selections), self._most - kept))
        if not len(rows_N):
            return
        self._kept[selections.text] = kept + len(rows_N)
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


def _pyarrow() -> tuple[Any, Any]:
    wanted_by = "an analysis in Parquet"
    return import_optional("pyarrow", wanted_by), import_optional("pyarrow.parquet", wanted_by)
