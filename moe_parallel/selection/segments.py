"""Selection by segment: a run of T_s tokens of a sequence. The last segment may be shorter.

The router sees the mean over a segment's tokens, and its result is used for the next segment. This
keeps a language model causal (Lory, section 3.1). The pseudo-code in the paper's Appendix A shifts
with a `roll` over all axes of a tensor, which mixes experts and sequences. Here each sequence is
shifted separately.

Shape suffixes: S tokens of a sequence, B sequences, G segments of a sequence, M stretches of it
with one merge each, E experts, K choices, T tokens of this rank, D model width, X anything.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moe_parallel.selection.choices import Choices, Rule
from moe_parallel.selection.rules import FirstSegment, own, shifted
from moe_parallel.selection.tokens import Share, Tokens, take


def segment_sizes(tokens: int, length: int) -> list[int]:
    """The number of tokens of each segment of a sequence; a list of ceil(tokens / length)."""
    short = tokens % length
    return [length] * (tokens // length) + [short] * (short > 0)


def segment_sums(x_SBX: torch.Tensor, length: int) -> torch.Tensor:
    """The sum over the tokens of each segment, in fp32 or wider: [G, B, X]."""
    dtype = torch.promote_types(x_SBX.dtype, torch.float32)
    full = len(x_SBX) // length
    in_full, in_short = x_SBX.split([full * length, len(x_SBX) - full * length])
    sums_GBX = in_full.unflatten(0, (full, length)).sum(1, dtype=dtype)
    if not len(in_short):
        return sums_GBX
    return torch.cat([sums_GBX, in_short.sum(0, keepdim=True, dtype=dtype)])


def segment_sums_of_share(
    x_SBX: torch.Tensor, share: Share, tokens: int, length: int
) -> torch.Tensor:
    """The sums over a share's tokens of each segment of the whole sequence: [G, B, X].

    Args:
        x_SBX: the tokens of the share.
        share: their positions; a segment may begin or end within it, or lie outside.
        tokens: of the whole sequence.
        length: T_s.
    """
    segments = -(-tokens // length)
    found = []
    for run, piece in zip(share, x_SBX.split([len(run) for run in share]), strict=True):
        # The range may begin in the middle of a segment, of which these tokens are the end.
        end = min(-run.start % length, len(run))
        parts = [part for part in piece.split([end, len(run) - end]) if len(part)]
        sums_GBX = torch.cat([segment_sums(part, length) for part in parts])
        before = run.start // length
        after = segments - before - len(sums_GBX)
        found.append(F.pad(sums_GBX, (0, 0, 0, 0, before, after)))
    return functools.reduce(torch.add, found)


def means_of(sums_GBX: torch.Tensor, tokens: int, length: int) -> torch.Tensor:
    """The means of segments from their sums: [G, B, X]. `tokens`: of a sequence."""
    sizes_G11 = torch.full_like(sums_GBX[:, :1, :1], length)
    sizes_G11[-1] = segment_sizes(tokens, length)[-1]
    return sums_GBX / sizes_G11


@dataclass(frozen=True)
class Merges:
    """The M stretches of each sequence, and the merge weights of the experts for each stretch."""

    sizes: list[int]  # tokens of each stretch, in order
    weights_MBE: torch.Tensor  # fp32 or wider; they sum to 1 over the experts

    def within(self, share: Share) -> Merges:
        """The merges of a share's tokens. A stretch that the share cuts is one in each part."""
        ends = list(itertools.accumulate(self.sizes))
        sizes, weights = [], []
        for run in share:
            first, last = bisect_right(ends, run.start), bisect_left(ends, run.stop)
            cuts = [run.start, *ends[first:last], run.stop]
            sizes += [end - begin for begin, end in itertools.pairwise(cuts)]
            weights.append(self.weights_MBE[first : last + 1])
        return Merges(sizes, torch.cat(weights))

    def tokens_MB(self) -> torch.Tensor:
        """The number of tokens that each merged expert computes: fp32 [M, B]."""
        sequences, device = self.weights_MBE.shape[1], self.weights_MBE.device
        return torch.cat(
            [
                torch.full((count, sequences), float(size), device=device)
                for size, count in self._runs()
            ]
        )

    def parts(self, x_SBD: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Runs of stretches of equal size, with their weights: [M', size, B, D], [M', B, E].

        Flattened over the first two axes and joined, the parts give the sequence again.
        """
        stretch = token = 0
        for size, count in self._runs():
            x_MTBD = x_SBD[token : token + count * size].unflatten(0, (count, size))
            yield x_MTBD, self.weights_MBE[stretch : stretch + count]
            stretch, token = stretch + count, token + count * size

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Runs of consecutive stretches of equal size: (size, number of stretches)."""
        return ((size, len(list(run))) for size, run in itertools.groupby(self.sizes))


def by_previous(e_GBE: torch.Tensor, sizes: list[int], first: FirstSegment) -> Merges:
    """Each segment uses the weights of the previous segment (Lory, Eq. 3)."""
    return Merges(sizes, shifted(e_GBE, first))


def by_first(e_GBE: torch.Tensor, sizes: list[int], first: FirstSegment) -> Merges:
    """Prefix routing: later segments use the weights of the first (Lory, section 5.1).

    The router's gradient comes from these segments. The first segment's own use of its weights has
    no gradient, as in Lory.
    """
    stretches = [sizes[0], sum(sizes[1:])][: len(sizes)]
    return Merges(stretches, torch.cat([first(e_GBE), e_GBE[:1]])[: len(sizes)])


@dataclass(frozen=True)
class BySegment:
    """Applies a rule to segments instead of tokens (Lory, section 5.3).

    All tokens of a segment get the choices of the segment. The scores of a segment are the mean of
    the scores in the previous segment. For a linear router, they equal the scores of that segment's
    mean. The first segment uses its own scores, without gradient, as in Lory. `rule` sees the
    segments of the whole micro-batch: the first segments of all sequences, then the second, ...
    """

    rule: Rule
    length: int  # T_s

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        share = tokens.share(len(scores_TE))
        total = len(scores_TE) // tokens.num_sequences * tokens.num_shares
        scores_SBE = scores_TE.unflatten(0, (-1, tokens.num_sequences))
        sums_GBE = segment_sums_of_share(scores_SBE, share, total, self.length)
        # Every rank needs all sums, and each sum affects the tokens of all ranks.
        sums_GBE = tokens.sum_for_each(sums_GBE)
        judged_GBE = shifted(means_of(sums_GBE, total, self.length), own)
        segments = Tokens(
            tokens.num_sequences,
            layer=tokens.layer,
            find_place=lambda: (tokens.iteration, tokens.first_sequence),
            seed=tokens.seed,
        )
        chosen = self.rule(judged_GBE.flatten(0, 1), segments)

        def of_tokens(rows_AX: torch.Tensor) -> torch.Tensor:
            """Converts rows per segment, [G * B, X], to rows per token of this rank: [T, X]."""
            rows_GBX = rows_AX.unflatten(0, (len(judged_GBE), tokens.num_sequences))
            # expand and slice, because the gradient of indexing sums in no fixed order.
            rows_GSBX = rows_GBX[:, None].expand(-1, self.length, -1, -1)
            return take(rows_GSBX.flatten(0, 1), share).flatten(0, 1)

        return Choices(
            of_tokens(chosen.experts_TK),
            of_tokens(chosen.probs_TK),
            of_tokens(chosen.scores_TE),
            of_tokens(chosen.probabilities_TE),
        )
