"""Totals over the selections of a model on texts. Their size does not grow with the tokens.

Shape suffixes: T tokens, G layers with experts, E experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_parallel.analysis.routing.selections import TextSelections
from moe_parallel.analysis.routing.specialization import Blocks
from moe_parallel.analysis.routing.vocabulary import Vocabulary


@dataclass
class TextTotals:
    """The sums of one text. `shares_GE`: choices, or weights of merged experts."""

    shares_GE: np.ndarray
    experts_G: np.ndarray  # used by the tokens
    entropy_G: np.ndarray
    dropped_G: np.ndarray
    tokens: int = 0

    @classmethod
    def zeros(cls, num_layers: int, num_experts: int) -> TextTotals:
        shares_GE = np.zeros((num_layers, num_experts))
        return cls(shares_GE, np.zeros(num_layers), np.zeros(num_layers), np.zeros(num_layers))

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


@dataclass
class AnalysisTotals:
    """All totals of an analysis.

    `pairs_GEE[g, i, j]`: tokens that use both experts i and j of a layer; i = j: that use i.
    """

    layers: Sequence[int]
    num_experts: int
    vocabulary: Vocabulary
    texts: dict[str, TextTotals] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers, experts = len(self.layers), self.num_experts
        self.pairs_GEE = np.zeros((layers, experts, experts), dtype=np.int64)
        self.blocks = Blocks(layers, experts)

    @property
    def tokens(self) -> int:
        return sum(totals.tokens for totals in self.texts.values())

    def add(self, selections: TextSelections) -> None:
        """Add some tokens. The sequences of a text come in ascending order."""
        totals = self.texts.setdefault(
            selections.text, TextTotals.zeros(len(self.layers), self.num_experts)
        )
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
        self._add_sequences(selections, totals)
        self.vocabulary.add(
            selections.token_T, selections.sample_T, used_T / max(1, len(self.layers))
        )

    def _add_sequences(self, selections: TextSelections, totals: TextTotals) -> None:
        edges = np.flatnonzero(np.diff(selections.sample_T)) + 1
        for rows_N in np.split(np.arange(len(selections)), edges):
            if not len(rows_N):
                continue
            shares = [layer.of(rows_N).shares_E() for layer in selections.layers]
            shares_GE = np.stack(shares) if shares else np.zeros((0, self.num_experts))
            totals.shares_GE += shares_GE
            self.blocks.add(selections.text, int(selections.sample_T[rows_N[0]]), shares_GE)
