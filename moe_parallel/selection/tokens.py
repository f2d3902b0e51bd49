"""The position of a rank's tokens in their micro-batch, and the share of a sequence that it holds.

Context parallelism divides a sequence as Megatron-Core does: into 2 cp chunks of equal length, of
which rank r holds chunks r and 2 cp - 1 - r. With a causal mask an early token attends to few keys
and a late one to many, so that all ranks have as much to compute. Tensor parallelism divides the
tokens of such a share once more, into stretches in their order. A share is a list of ranges, from
the first position to the last.

Shape suffixes: T tokens of this rank, A tokens of the whole micro-batch, S tokens of a share, X
anything.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

Share = list[range]


def zigzag(length: int, ranks: int, rank: int) -> Share:
    """The share of a context-parallel rank of a sequence; 2 * `ranks` divides `length`."""
    if ranks == 1:
        return [range(length)]
    chunk = length // (2 * ranks)
    assert chunk * 2 * ranks == length, (length, ranks)
    chunks = (rank, 2 * ranks - 1 - rank)
    if rank == ranks - 1:  # the two chunks are neighbors
        return [range(chunks[0] * chunk, (chunks[1] + 1) * chunk)]
    return [range(number * chunk, (number + 1) * chunk) for number in chunks]


def part_of(share: Share, parts: int, part: int) -> Share:
    """A part of a share: the tokens number `part` * n to (`part` + 1) * n - 1 of `parts` * n."""
    size = sum(map(len, share)) // parts
    first, last, passed = part * size, (part + 1) * size, 0
    found = []
    for run in share:
        inside = run[max(first - passed, 0) : max(last - passed, 0)]
        passed += len(run)
        if len(inside):
            found.append(inside)
    return found


def positions(share: Share, device: torch.device | None = None) -> torch.Tensor:
    """The positions of the tokens of a share: int64 [S]."""
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in share])


def take(x: torch.Tensor, share: Share, axis: int = 0) -> torch.Tensor:
    """The tokens of a share out of all tokens of a sequence. A view, if the share is one range.

    Slices, because the gradient of indexing sums in no fixed order.
    """
    parts = [x.narrow(axis, run.start, len(run)) for run in share]
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def in_order(x: torch.Tensor, shares: Sequence[Share], axis: int = 0) -> torch.Tensor:
    """All tokens of a sequence by position, from the tokens of all shares, one after another."""
    runs = [run for share in shares for run in share]
    if runs == sorted(runs, key=lambda run: run.start):
        return x
    pieces = x.split([len(run) for run in runs], axis)
    by_position = sorted(zip(runs, pieces, strict=True), key=lambda each: each[0].start)
    return torch.cat([piece for _, piece in by_position], axis)


@dataclass(frozen=True)
class Tokens:
    """The T tokens that a rank routes, in Megatron's order [S, B]. Here they are all tokens.

    `layers.split_tokens` has the subclass for a rank that holds a share of every sequence.
    Rules and losses get values of other ranks only from these methods, and so are pure functions.

    Shape suffixes: T tokens of this rank, A tokens of the whole micro-batch.
    """

    num_sequences: int  # B
    layer: int = field(default=1, kw_only=True)  # that routes them; its number in the model, from 1
    #: Finds `iteration` and `first_sequence` at their first reader. torch.compile compiles anew for
    #: each value of a number that a pass reads.
    find_place: Callable[[], tuple[int, int]] = field(default=lambda: (0, 0), kw_only=True)
    seed: int = field(default=0, kw_only=True)  # of the run
    #: int64: the ids of the T tokens, if the system reads them.
    ids_T: torch.Tensor | None = field(default=None, kw_only=True, compare=False, repr=False)

    @cached_property
    def _place(self) -> tuple[int, int]:
        return self.find_place()

    @property
    def iteration(self) -> int:
        """The number of optimizer steps so far."""
        return self._place[0]

    @property
    def first_sequence(self) -> int:
        """The first sequence among those of the step, over all data-parallel ranks, from 0."""
        return self._place[1]

    @property
    def num_shares(self) -> int:
        """The number of shares of equal size into which the ranks divide every sequence."""
        return 1

    @property
    def num_stretches(self) -> int:
        """The number of stretches of a sequence over whose tokens a capacity counts, one by one."""
        return 1

    def share(self, num_tokens: int) -> Share:
        """The positions in the sequence of this rank's tokens. `num_tokens`: T."""
        return [range(num_tokens // self.num_sequences)]

    def uniform(self, x_TX: torch.Tensor) -> torch.Tensor:
        """Random numbers of [0, 1) for a rule, fp32, one for each number of x_TX: [T, X].

        They are those of the place: of the seed, the step, the layer, the sequence in the global
        batch and the position in it. So a run repeats them, a recomputation too, no two places
        share them, and they are the same in every layout. Every call in a pass gives the same.
        """
        num_tokens, columns = x_TX.shape
        length = num_tokens // self.num_sequences * self.num_shares
        numbers = []
        for sequence in range(self.first_sequence, self.first_sequence + self.num_sequences):
            place = f"{self.seed} {self.iteration} {self.layer} {sequence}"
            generator = torch.Generator(x_TX.device).manual_seed(zlib.crc32(place.encode()))
            drawn_SX = torch.rand(length, columns, generator=generator, device=x_TX.device)
            numbers.append(take(drawn_SX, self.share(num_tokens)))
        return torch.stack(numbers, dim=1).flatten(0, 1)

    def of_micro_batch(self, x_TX: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks in the order [S, B]: [A, X]. Without gradient."""
        return x_TX.detach()

    def of_this_rank(self, x_AX: torch.Tensor) -> torch.Tensor:
        """This rank's part of the rows of the whole micro-batch: [T, X]."""
        return x_AX

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the ranks, for a loss that all ranks compute identically.

        The gradient of each rank's x is the gradient of the sum.
        """
        return x

    def sum_for_each(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the ranks, which each rank uses for its own tokens.

        The gradient of each rank's x is the gradient of the sum, summed over the ranks.
        """
        return x
