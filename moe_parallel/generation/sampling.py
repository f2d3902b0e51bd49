"""How the next token is drawn from the logits of a model.

Shape suffixes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moe_parallel.errors import InputError

#: Changes the logits of B sequences, given the tokens of each so far: fp32 [B, V] -> [B, V].
#: A token with the logit -inf is never drawn.
Filter = Callable[[torch.Tensor, Sequence[Sequence[int]]], torch.Tensor]


@dataclass(frozen=True)
class RepetitionPenalty:
    """Makes tokens that occurred less probable (Keskar et al. 2019, CTRL, section 4.1).

    A positive logit of such a token is divided by `penalty`, a negative one is multiplied by it.
    """

    penalty: float

    def __call__(self, logits_BV: torch.Tensor, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        seen_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
        for row, sequence in enumerate(tokens):
            seen_BV[row, torch.tensor(sequence, device=logits_BV.device)] = True
        rarer_BV = torch.where(logits_BV > 0, logits_BV / self.penalty, logits_BV * self.penalty)
        return torch.where(seen_BV, rarer_BV, logits_BV)


@dataclass(frozen=True)
class Temperature:
    """Divides the logits: below 1, probable tokens become more probable."""

    temperature: float

    def __call__(self, logits_BV: torch.Tensor, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        return logits_BV / self.temperature


@dataclass(frozen=True)
class TopKFilter:
    """Only the k most probable tokens, and those that tie with the last of them."""

    k: int

    def __call__(self, logits_BV: torch.Tensor, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        k = min(self.k, logits_BV.shape[1])
        least_B1 = logits_BV.topk(k).values[:, -1:]
        return logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)


@dataclass(frozen=True)
class TopPFilter:
    """Only the most probable tokens whose probabilities together reach p (Holtzman et al. 2020)."""

    p: float

    def __call__(self, logits_BV: torch.Tensor, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        sorted_BV, order_BV = logits_BV.sort(descending=True, stable=True)
        probabilities_BV = sorted_BV.softmax(1)
        before_BV = probabilities_BV.cumsum(1) - probabilities_BV
        drops_BV = before_BV >= self.p
        drops_BV[:, 0] = False
        return logits_BV.masked_fill(drops_BV.scatter(1, order_BV, drops_BV), -torch.inf)


@dataclass(frozen=True)
class MinP:
    """Only tokens at least p times as probable as the most probable one (Nguyen et al. 2024)."""

    p: float

    def __call__(self, logits_BV: torch.Tensor, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        probabilities_BV = logits_BV.softmax(1)
        least_B1 = self.p * probabilities_BV.amax(1, keepdim=True)
        return logits_BV.masked_fill(probabilities_BV < least_B1, -torch.inf)


@dataclass(frozen=True)
class Sampling:
    """The options of sampling; a default leaves the probabilities of the model as they are."""

    temperature: float = 1.0  # 0: always the most probable token
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def check(self) -> None:
        """Raises InputError for a value out of range."""
        _check("temperature", self.temperature, self.temperature >= 0, "at least 0")
        _check("top-k", self.top_k, self.top_k is None or self.top_k >= 1, "at least 1")
        _check("top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("min-p", self.min_p, 0 <= self.min_p <= 1, "at least 0 and at most 1")
        penalty = self.repetition_penalty
        _check("repetition-penalty", penalty, 0 < penalty < float("inf"), "above 0")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def filters(self) -> list[Filter]:
        """The filters of these options, in the order in which transformers applies them."""
        found: list[Filter] = []
        if self.repetition_penalty != 1:
            found.append(RepetitionPenalty(self.repetition_penalty))
        if self.is_greedy:  # no other filter changes which token is the most probable
            return found
        if self.temperature != 1:
            found.append(Temperature(self.temperature))
        if self.top_k is not None:
            found.append(TopKFilter(self.top_k))
        if self.top_p < 1:
            found.append(TopPFilter(self.top_p))
        if self.min_p > 0:
            found.append(MinP(self.min_p))
        return found


def _check(name: str, value: object, valid: bool, rule: str) -> None:
    if not valid:
        raise InputError(f"--{name} is {value}: it must be {rule}")


class Sampler:
    """Draws the next token of sequences. Each has a generator, so that what is drawn for it does
    not depend on the others of its batch."""

    def __init__(self, sampling: Sampling, seed: int, numbers: Sequence[int]) -> None:
        """`numbers`: of the sequences; a number and the seed determine what is drawn."""
        self.filters = sampling.filters()
        self.is_greedy = sampling.is_greedy
        self._generators = [torch.Generator().manual_seed(seed + number) for number in numbers]

    def draw(
        self, logits_BV: torch.Tensor, rows: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> list[int]:
        """A token for each of some of the sequences.

        Args:
            logits_BV: fp32, on any device.
            rows: the places of these sequences in `numbers`.
            tokens: of each sequence so far.
        """
        for each in self.filters:
            logits_BV = each(logits_BV, tokens)
        if self.is_greedy:
            greatest: list[int] = logits_BV.argmax(1).tolist()
            return greatest
        probabilities_BV = logits_BV.cpu().softmax(1)
        return [
            int(torch.multinomial(p_V, 1, generator=self._generators[row]))
            for p_V, row in zip(probabilities_BV, rows, strict=True)
        ]
