"""Decisions by segments: stretches of T_s tokens of a sequence, the last of which may be shorter.

A segment is known by the mean over its tokens, and decides for the segment after it: that is what
keeps a language model causal (Lory, section 3.1). The pseudo-code of the paper's Appendix A shifts
with a `roll` over all axes of a tensor, which mixes experts and sequences; here each sequence is
shifted by itself.

Shape suffixes: S tokens of a sequence, B sequences, G segments of a sequence, M stretches of it
that are merged for, E experts, K choices, T tokens of this rank, D model width, X anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

from moe_parallel.selection.choices import Choices, Rule
from moe_parallel.selection.tokens import Tokens


def segment_sizes(tokens: int, length: int) -> list[int]:
    """How many tokens each segment of a sequence has: ceil(tokens / length) of them."""
    short = tokens % length
    return [length] * (tokens // length) + [short] * (short > 0)


def segment_sums(x_SBX: torch.Tensor, length: int) -> torch.Tensor:
    """The sum over each segment, at least in fp32: [G, B, X]."""
    dtype = torch.promote_types(x_SBX.dtype, torch.float32)
    full = len(x_SBX) // length
    in_full, in_short = x_SBX.split([full * length, len(x_SBX) - full * length])
    sums_GBX = in_full.unflatten(0, (full, length)).sum(1, dtype=dtype)
    if not len(in_short):
        return sums_GBX
    return torch.cat([sums_GBX, in_short.sum(0, keepdim=True, dtype=dtype)])


def segment_means(x_SBX: torch.Tensor, length: int) -> torch.Tensor:
    """The mean over each segment's own tokens, at least in fp32: [G, B, X]."""
    return _means(segment_sums(x_SBX, length), len(x_SBX), length)


def _means(sums_GBX: torch.Tensor, tokens: int, length: int) -> torch.Tensor:
    sizes_G11 = torch.full_like(sums_GBX[:, :1, :1], length)
    sizes_G11[-1] = segment_sizes(tokens, length)[-1]
    return sums_GBX / sizes_G11


#: What a first segment, which none precedes, takes: [G, B, E] -> [1, B, E], without gradient.
FirstSegment = Callable[[torch.Tensor], torch.Tensor]


def own(e_GBE: torch.Tensor) -> torch.Tensor:
    """Its own weights, their gradient stopped. Its tokens thereby see later ones among them."""
    return e_GBE[:1].detach()


def uniform(e_GBE: torch.Tensor) -> torch.Tensor:
    """1/n of each expert."""
    return torch.full_like(e_GBE[:1], 1 / e_GBE.shape[2])


FIRST_SEGMENT: dict[str, FirstSegment] = {"own": own, "uniform": uniform}


def shifted(e_GBE: torch.Tensor, first: FirstSegment) -> torch.Tensor:
    """What each segment takes from the one before it in its sequence: [G, B, E]."""
    return torch.cat([first(e_GBE), e_GBE[:-1]])


@dataclass(frozen=True)
class Merges:
    """Sequences cut into M stretches, and how the experts are merged for each of them."""

    sizes: list[int]  # tokens of each stretch, in order
    weights_MBE: torch.Tensor  # at least fp32; of each expert, summing to 1

    def tokens_MB(self) -> torch.Tensor:
        """How many tokens each merged expert computes: fp32 [M, B]."""
        sequences, device = self.weights_MBE.shape[1], self.weights_MBE.device
        return torch.cat(
            [
                torch.full((count, sequences), float(size), device=device)
                for size, count in self._runs()
            ]
        )

    def parts(self, x_SBD: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The tokens by stretches of equal size, and their weights: [M', size, B, D], [M', B, E].

        Joined again along the first two axes of the tokens, the parts are the sequence.
        """
        stretch = token = 0
        for size, count in self._runs():
            x_MTBD = x_SBD[token : token + count * size].unflatten(0, (count, size))
            yield x_MTBD, self.weights_MBE[stretch : stretch + count]
            stretch, token = stretch + count, token + count * size

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Consecutive stretches of equal size: (size, how many)."""
        return ((size, len(list(run))) for size, run in groupby(self.sizes))


#: How the weights of segments become merges: (e_GBE, tokens of each segment, first segment).
MergeRule = Callable[[torch.Tensor, list[int], FirstSegment], Merges]


def by_previous(e_GBE: torch.Tensor, sizes: list[int], first: FirstSegment) -> Merges:
    """Each segment by the one before it (Lory, Eq. 3)."""
    return Merges(sizes, shifted(e_GBE, first))


def by_first(e_GBE: torch.Tensor, sizes: list[int], first: FirstSegment) -> Merges:
    """All segments after the first by the first: prefix routing (Lory, section 5.1).

    They give the router its gradient; the first segment's own use gives none, as in Lory.
    """
    stretches = [sizes[0], sum(sizes[1:])][: len(sizes)]
    return Merges(stretches, torch.cat([first(e_GBE), e_GBE[:1]])[: len(sizes)])


@dataclass(frozen=True)
class BySegment:
    """A rule over whole segments, each of which stands for its tokens (Lory, section 5.3).

    A segment's scores are the mean of those of the segment before it, which for a linear router are
    the scores of that segment's mean; the first takes its own, gradient stopped, as in Lory. `rule`
    sees the segments of the whole micro-batch, the first ones of all sequences first.
    """

    rule: Rule
    length: int  # T_s

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        here = len(scores_TE) // tokens.num_sequences
        first, total = tokens.first_position(len(scores_TE)), here * tokens.num_stretches
        scores_SBE = scores_TE.unflatten(0, (here, tokens.num_sequences))
        padded_SBE = F.pad(scores_SBE, (0, 0, 0, 0, first, total - first - here))
        # Every rank needs all sums, and all ranks' tokens hang on each.
        sums_GBE = tokens.sum_for_each(segment_sums(padded_SBE, self.length))
        judged_GBE = shifted(_means(sums_GBE, total, self.length), own)
        chosen = self.rule(judged_GBE.flatten(0, 1), Tokens(tokens.num_sequences))

        def of_tokens(rows_AX: torch.Tensor) -> torch.Tensor:
            """What stands for segments, [G * B, X], for each token of this rank: [T, X]."""
            rows_GBX = rows_AX.unflatten(0, (len(judged_GBE), tokens.num_sequences))
            # Expanded and cut instead of indexed: the gradient of an index adds in any order.
            rows_GSBX = rows_GBX[:, None].expand(-1, self.length, -1, -1)
            return rows_GSBX.flatten(0, 1)[first : first + here].flatten(0, 1)

        return Choices(
            of_tokens(chosen.experts_TK),
            of_tokens(chosen.probs_TK),
            of_tokens(chosen.scores_TE),
            of_tokens(chosen.probabilities_TE),
        )
