"""The share of a sequence that a rank holds, as the positions of its tokens.

Context parallelism divides a sequence as Megatron-Core does: into 2 cp chunks of equal length, of
which rank r holds chunks r and 2 cp - 1 - r. With a causal mask an early token attends to few keys
and a late one to many, so that all ranks have as much to compute. Tensor parallelism divides the
tokens of such a share once more, into stretches in their order. A share is a list of ranges, from
the first position to the last.

Shape suffixes: S tokens of a share, X anything.
"""

from __future__ import annotations

from collections.abc import Sequence

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
