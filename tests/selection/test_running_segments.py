"""Segments whose tokens come one at a time: compared with those of the whole sequence."""

import pytest
import torch

from moe_parallel.selection.segments import RunningSegments


def reference(x_SBX: torch.Tensor, length: int, only_first: bool) -> torch.Tensor | None:
    """The mean of the last complete segment, or of the first: [B, X]; None: there is none."""
    segments = [part for part in x_SBX.split(length) if len(part) == length]
    if not segments:
        return None
    return (segments[0] if only_first else segments[-1]).mean(0)


def some_tokens(sequences: int) -> torch.Tensor:
    return torch.randn(14, sequences, 3, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("only_first", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 20])
@pytest.mark.parametrize("start", [1, 3, 4, 9])
def test_one_token_at_a_time(start: int, length: int, only_first: bool) -> None:
    x_SBX = some_tokens(2)
    running = RunningSegments.after(x_SBX[:start], length, only_first)
    for tokens in range(start, len(x_SBX) + 1):
        expected = reference(x_SBX[:tokens], length, only_first)
        assert running.complete_B.tolist() == [expected is not None] * 2
        if expected is not None:
            torch.testing.assert_close(running.mean_BX, expected)
        if tokens < len(x_SBX):
            running.add(x_SBX[tokens])


@pytest.mark.parametrize("only_first", [False, True])
def test_sequences_of_their_own_lengths_and_segments(only_first: bool) -> None:
    x_SBX = some_tokens(3)
    starts, lengths = [2, 5, 7], [3, 2, 7]
    parts = [
        RunningSegments.after(x_SBX[:start, i : i + 1], length, only_first)
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    running = RunningSegments.joined(parts)
    for step in range(4):
        running.add(torch.stack([x_SBX[start + step, i] for i, start in enumerate(starts)]))
    kept = running.rows(torch.tensor([2, 0]))
    for row, i in enumerate([2, 0]):
        whole = x_SBX[: starts[i] + 4, i : i + 1]
        expected = reference(whole, lengths[i], only_first)
        assert expected is not None and kept.complete_B[row]
        torch.testing.assert_close(kept.mean_BX[row : row + 1], expected)
