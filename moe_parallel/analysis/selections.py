"""The selections of a model for some tokens, as numpy arrays.

Shape suffixes: T tokens, K slots of a token, E experts, P merged experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class ChosenExperts:
    """The choices of a layer that dispatches T tokens, before capacity drops any."""

    layer: int  # from 1
    entropy_T: np.ndarray  # fp32: of the softmax over all scores, nats
    dropped_T: np.ndarray  # int: choices over capacity
    experts_TK: np.ndarray  # int; -1: an empty slot
    probs_TK: np.ndarray  # fp32
    num_experts: int  # E, of the layer

    def of(self, rows_N: np.ndarray) -> ChosenExperts:
        """The selections of some tokens, in that order."""
        return replace(
            self,
            experts_TK=self.experts_TK[rows_N],
            probs_TK=self.probs_TK[rows_N],
            entropy_T=self.entropy_T[rows_N],
            dropped_T=self.dropped_T[rows_N],
        )

    def shares_E(self) -> np.ndarray:
        """fp64: the number of tokens of each expert."""
        bins = np.bincount(self.experts_TK.ravel() + 1, minlength=self.num_experts + 1)
        return bins[1:].astype(np.float64)

    @cached_property
    def active_TE(self) -> np.ndarray:
        """bool: whether the token uses the expert."""
        active = np.zeros((len(self.experts_TK), self.num_experts + 1), dtype=bool)
        np.put_along_axis(active, self.experts_TK.astype(np.int64) + 1, True, axis=1)
        return active[:, 1:]

    def slots(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(number for each token [T], experts, weights): the tokens' experts one after another, the
        best of each token first."""
        filled_TK = self.experts_TK >= 0
        return filled_TK.sum(axis=1), self.experts_TK[filled_TK], self.probs_TK[filled_TK]

    def best_T(self) -> np.ndarray:
        """int: the expert of each token with the largest weight; -1 if it has none."""
        if not self.experts_TK.shape[1]:
            return np.full(len(self.experts_TK), -1)
        probs_TK = np.where(self.experts_TK >= 0, self.probs_TK, -np.inf)
        best_T1 = probs_TK.argmax(axis=1)[:, None]
        return np.take_along_axis(self.experts_TK, best_T1, axis=1)[:, 0]


@dataclass(frozen=True)
class MergedSelections:
    """The weights of a layer that merges experts, with the methods of `ChosenExperts`. An expert is
    used if its weight is above 2 / E, as in Lory's Appendix."""

    layer: int
    entropy_T: np.ndarray  # fp32: of the merge weights, nats
    dropped_T: np.ndarray  # 0
    weights_PE: np.ndarray  # fp32
    merge_T: np.ndarray  # int: the merged expert that computes the token

    @property
    def num_experts(self) -> int:
        return self.weights_PE.shape[1]

    def of(self, rows_N: np.ndarray) -> MergedSelections:
        return replace(
            self,
            merge_T=self.merge_T[rows_N],
            entropy_T=self.entropy_T[rows_N],
            dropped_T=self.dropped_T[rows_N],
        )

    def shares_E(self) -> np.ndarray:
        """fp64: the sum of each expert's weights over the tokens."""
        tokens_P = np.bincount(self.merge_T, minlength=len(self.weights_PE))
        return tokens_P @ self.weights_PE.astype(np.float64)

    @cached_property
    def active_TE(self) -> np.ndarray:
        return (self.weights_PE > 2 / self.num_experts)[self.merge_T]

    def slots(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        order_PE = np.argsort(-self.weights_PE, axis=1, kind="stable")
        sorted_TE = np.take_along_axis(self.weights_PE, order_PE, axis=1)[self.merge_T]
        filled_TE = sorted_TE > 2 / self.num_experts
        return filled_TE.sum(axis=1), order_PE[self.merge_T][filled_TE], sorted_TE[filled_TE]

    def best_T(self) -> np.ndarray:
        return self.weights_PE.argmax(axis=1)[self.merge_T]


LayerSelections = ChosenExperts | MergedSelections


@dataclass(frozen=True)
class TextSelections:
    """The selections of all layers with experts for T tokens of one text, in the order of the text.

    The tokens of a sequence are together, and their positions ascend.
    """

    text: str
    sample_T: np.ndarray  # int64: the number of the sequence in its text
    position_T: np.ndarray  # int32: in the sequence
    token_T: np.ndarray  # int64: item of the vocabulary
    layers: tuple[LayerSelections, ...]

    def __len__(self) -> int:
        return len(self.token_T)
