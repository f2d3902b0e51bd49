"""The tables of an analysis, as columns of Python and numpy values.

loads           text, layer, expert, tokens (choices, or sums of merge weights), share
layers          text, layer, tokens, experts_per_token, ent_load, ent_conf (nats), dropped (choices)
pairs           layer, expert, other, tokens that use both; only pairs with expert <= other
specialization  layer (null: mean over layers), mutual_information, by_chance (nats), p
vocabulary      token, text, occurrences, experts_per_token, as_word (occurrences as a word)

Shape suffixes: E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from moe_parallel.analysis.routing.specialization import Specialization
from moe_parallel.analysis.routing.totals import AnalysisTotals

TableColumns = dict[str, Any]


def tables_of(totals: AnalysisTotals, tests: Sequence[Specialization]) -> dict[str, TableColumns]:
    """The tables by name."""
    return {
        "loads": _loads(totals),
        "layers": _layers(totals),
        "pairs": _pairs(totals),
        "specialization": {
            name: [asdict(test)[name] for test in tests]
            for name in ("layer", "mutual_information", "by_chance", "p")
        },
        "vocabulary": _vocabulary(totals),
    }


def _loads(totals: AnalysisTotals) -> TableColumns:
    layers, experts, texts = len(totals.layers), totals.num_experts, totals.texts.values()
    size = layers * experts
    return {
        "text": [name for name in totals.texts for _ in range(size)],
        "layer": np.tile(np.repeat(np.array(totals.layers, dtype=np.int16), experts), len(texts)),
        "expert": np.tile(np.arange(experts, dtype=np.int16), layers * len(texts)),
        "tokens": _joined([text.shares_GE.ravel() for text in texts]),
        "share": _joined([text.load_GE().ravel() for text in texts]),
    }


def _layers(totals: AnalysisTotals) -> TableColumns:
    texts = totals.texts.values()
    return {
        "text": [name for name in totals.texts for _ in totals.layers],
        "layer": np.tile(np.array(totals.layers, dtype=np.int16), len(texts)),
        "tokens": [text.tokens for text in texts for _ in totals.layers],
        "experts_per_token": _joined([text.mean_G(text.experts_G) for text in texts]),
        "ent_load": _joined([text.ent_load_G() for text in texts]),
        "ent_conf": _joined([text.mean_G(text.entropy_G) for text in texts]),
        "dropped": _joined([text.dropped_G for text in texts]).astype(np.int64),
    }


def _pairs(totals: AnalysisTotals) -> TableColumns:
    one_N, other_N = np.triu_indices(totals.num_experts)
    layers = np.array(totals.layers, dtype=np.int16)
    return {
        "layer": np.repeat(layers, len(one_N)),
        "expert": np.tile(one_N.astype(np.int16), len(layers)),
        "other": np.tile(other_N.astype(np.int16), len(layers)),
        "tokens": totals.pairs_GEE[:, one_N, other_N].ravel(),
    }


def _vocabulary(totals: AnalysisTotals) -> TableColumns:
    vocabulary = totals.vocabulary
    items = vocabulary.ranked(1)
    return {
        "token": items,
        "text": [vocabulary.pieces_V[item] for item in items],
        "occurrences": vocabulary.tokens_V[items],
        "experts_per_token": vocabulary.experts_V[items] / vocabulary.tokens_V[items],
        "as_word": vocabulary.words_V[items],
    }


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0)
