"""Forced routing: a workload says which experts compute a token; the scores say only how much.

It is for benchmarks. The rule of the system runs as always and decides how many experts each token
has. The workload then replaces the experts, and the probs are those that the system's scores give
to the new ones. The gradients of the scores, the auxiliary losses and the work per token stay.

A workload is a table of shares: pi_E, the shares of the tokens that choose each expert. They sum to
the number k of experts per token, and none is above 1. Systematic sampling (Madow 1949) draws k
different experts with exactly these shares: the experts take adjacent intervals of the lengths pi_E
on the line from 0 to k, and a token with offset u in [0, 1) takes the experts of the points u,
u + 1, ..., u + k - 1. The offsets of the S tokens of a sequence are the S points (q + 1/2) / S, in
an order in which neighbors are far apart, so that every stretch of a sequence has nearly the same
load. For a fixed k the number of choices of each expert is S pi in every sequence, rounded up or
down.

The choices are a function of the seed, the layer, the iteration and the token's position in its
sequence. They are therefore the same in every layout, and the same if a run is resumed. All numbers
are integers, so they do not depend on the device either.

Shape suffixes: T tokens of this rank, K slots per token, E experts, N number of experts per token
from 0 to E.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

import torch

from moe_parallel.copies import copied_to
from moe_parallel.selection.choices import BiasedRule, Choices, Rule, best_first
from moe_parallel.selection.tokens import Tokens, positions

_ONE = 1 << 32  # shares are integers in units of 1 / _ONE


class Workload(Hashable, Protocol):
    """The shares of the experts, of a model with any number of them."""

    def weights(self, num_experts: int, k: int) -> Sequence[float]:
        """The shares pi_E up to a factor, for tokens with k experts. `shares_of` limits them to 1
        and scales them."""
        ...


@dataclass(frozen=True)
class Balanced:
    """Every expert has the same share, k / E."""

    def weights(self, num_experts: int, k: int) -> list[float]:
        return [1.0] * num_experts


@dataclass(frozen=True)
class Hot:
    """A share of all tokens chooses expert 0 of every layer; the other choices are balanced."""

    share: float

    def weights(self, num_experts: int, k: int) -> list[float]:
        return [self.share] + [(k - self.share) / max(num_experts - 1, 1)] * (num_experts - 1)


@dataclass(frozen=True)
class Zipf:
    """Zipf's law: the share of expert e = 0, 1, ... is proportional to (e + 1)^-exponent."""

    exponent: float

    def weights(self, num_experts: int, k: int) -> list[float]:
        return [(expert + 1.0) ** -self.exponent for expert in range(num_experts)]


def shares_of(weights_E: Sequence[float], k: int) -> list[int]:
    """The shares pi_E in proportion to the weights, in units of 1 / 2^32; they sum to k 2^32.

    An expert whose share would be above 1 gets every token, and the others share what it leaves.
    """
    shares = [0] * len(weights_E)
    left = {e: float(weight) for e, weight in enumerate(weights_E) if weight > 0}
    rest = k
    while left and rest:
        scale = rest / sum(left.values())
        full = [e for e, weight in left.items() if weight * scale >= 1]
        if not full:
            break
        for e in full[:rest]:
            shares[e] = _ONE
            del left[e]
            rest -= 1
    if not left:  # experts without a weight take what no other can
        left = {e: 1.0 for e, share in enumerate(shares) if not share}
    for e, weight in left.items():
        shares[e] = min(math.floor(weight * rest / sum(left.values()) * _ONE), _ONE)
    missing = k * _ONE - sum(shares)  # by rounding down, less than one unit for each
    for e in sorted(left, key=lambda e: shares[e])[:missing]:
        shares[e] += 1
    return shares


@dataclass(frozen=True)
class Forced:
    """The choices of `workload`, as many for each token as those of `rule`, with its probs."""

    rule: ForcibleRule
    workload: Workload
    seed: int

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        own = self.rule(scores_TE, tokens)
        # Slots are in the order of the scores, as in every rule.
        return self.rule.of(scores_TE, best_first(scores_TE, self._experts(own, tokens)))

    def with_bias(self, bias_E: torch.Tensor) -> Forced:
        """This rule, unchanged: a bias does not affect the choices of a workload."""
        return self

    def ranked(self, scores_TE: torch.Tensor) -> torch.Tensor:
        """The scores: no bias is added to them."""
        return scores_TE.detach()

    def _experts(self, own: Choices, tokens: Tokens) -> torch.Tensor:
        """int64 [T, K]; empty slots (-1) come last, as many as in `own`."""
        num_tokens, k = own.experts_TK.shape
        num_experts, device = own.scores_TE.shape[1], own.scores_TE.device
        slots_K = torch.arange(k, device=device)
        points_TK = self._offsets(num_tokens, tokens, device)[:, None] + slots_K * _ONE
        if own.all_chosen:
            (ends_E,) = self._ends([k], num_experts, device)
            return torch.searchsorted(ends_E, points_TK, right=True)
        number_T = (own.experts_TK >= 0).sum(dim=1)
        ends_TE = self._ends(range(num_experts + 1), num_experts, device)[number_T]
        experts_TK = torch.searchsorted(ends_TE, points_TK, right=True)
        return experts_TK.masked_fill(slots_K >= number_T[:, None], -1)

    def _ends(self, numbers: Iterable[int], num_experts: int, device: torch.device) -> torch.Tensor:
        """The ends of the experts' intervals, by number of experts per token: int64 [N, E]."""
        ends_NE = torch.tensor([_ends(self.workload, num_experts, k) for k in numbers])
        return copied_to(device, ends_NE)

    def _offsets(self, num_tokens: int, tokens: Tokens, device: torch.device) -> torch.Tensor:
        """The offset u of each token, in units of 1 / 2^32: int64 [T]."""
        length = num_tokens // tokens.num_sequences * tokens.num_shares
        places_S = positions(tokens.share(num_tokens), device)
        start = zlib.crc32(f"{self.seed} {tokens.layer} {tokens.iteration}".encode())
        places_S = (places_S * _stride(length) + start % length) % length
        offsets_S = (2 * places_S + 1) * (_ONE // 2) // length
        return offsets_S.repeat_interleave(tokens.num_sequences)


@functools.lru_cache(maxsize=4096)
def _ends(workload: Workload, num_experts: int, k: int) -> tuple[int, ...]:
    return tuple(itertools.accumulate(shares_of(workload.weights(num_experts, k), k)))


@runtime_checkable
class ForcibleRule(Rule, Protocol):
    """A rule that can give the probs of other choices than its own."""

    def of(self, scores_TE: torch.Tensor, experts_TK: torch.Tensor) -> Choices:
        """The choices for given experts: int64 [T, K]; -1: the slot is empty."""
        ...


def _stride(length: int) -> int:
    """A step through `length` places that visits each once, near the golden section of them."""
    stride = max(1, round(length * (math.sqrt(5) - 1) / 2))
    while math.gcd(stride, length) != 1:
        stride += 1
    return stride


#: (tokens, T, every) -> int64 [T, K] on the host: the recorded choices of T tokens, which are every
#: `every`-th of their sequences.
Recorded = Callable[[Tokens, int, int], torch.Tensor]


@dataclass(frozen=True)
class Replayed:
    """The recorded choices in place of those of `rule`, with the probs that it gives to them.

    The recorded order of the slots remains, so that choices which `rule` makes itself give the same
    probs to the bit. The probs are functions of the current scores, so gradients flow as always.
    """

    rule: ForcibleRule
    recorded: Recorded
    every: int = 1  # the tokens between two that it routes: the length of a segment

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        return self.rule.of(scores_TE, self.chosen(scores_TE, tokens))

    def chosen(self, scores_TE: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """The recorded choices of tokens with these scores: int64 [T, K]."""
        recorded_TK = self.recorded(tokens, len(scores_TE), self.every)
        return copied_to(scores_TE.device, recorded_TK)

    def with_bias(self, bias_E: torch.Tensor) -> Replayed:
        """A bias changes no recorded choice, but the probs of a threshold may depend on it."""
        if not hasattr(self.rule, "with_bias"):
            return self
        return replace(self, rule=self.rule.with_bias(bias_E))

    def ranked(self, scores_TE: torch.Tensor) -> torch.Tensor:
        """The values by which `rule` ranks experts, so that a bias moves as in a run of its own."""
        return cast(BiasedRule, self.rule).ranked(scores_TE)
