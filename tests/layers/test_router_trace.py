"""What the layers of one rank record and replay, worked by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from moe_parallel.errors import InputError
from moe_parallel.layers.dispatched import MicroBatches
from moe_parallel.layers.given_choices import Recorder, Replay, RouterTrace
from moe_parallel.selection.segments import BySegment
from moe_parallel.selection.tokens import Share, Tokens
from moe_parallel.selection.topk import TopK
from moe_parallel.systems.expert_choice.rule import ExpertChoice, raw


class Ends(Tokens):
    """The first and the last token of sequences of four, as one of two context-parallel ranks."""

    @property
    def num_shares(self) -> int:
        return 2

    def share(self, num_tokens: int) -> Share:
        return [range(1), range(3, 4)]


def test_micro_batches_are_counted_by_step_and_pass() -> None:
    counted = MicroBatches()
    # The first passes of a recomputation come before their second passes.
    assert [counted.next(0, with_gradients=False) for _ in range(2)] == [0, 1]
    assert [counted.next(0, with_gradients=True) for _ in range(2)] == [0, 1]
    assert counted.next(1, with_gradients=True) == 0  # a new step


def test_choices_have_their_places_in_the_global_batch() -> None:
    recorder = Recorder()
    experts_TK = torch.tensor([[0, 1], [2, 3], [4, 5], [6, -1]])  # [S, B] flattened
    recorder.add(Ends(2, layer=7, find_place=lambda: (0, 6)), experts_TK)
    experts_NSK = torch.zeros(8, 4, 2, dtype=torch.int32)
    recorder.take(7, experts_NSK)
    # Positions 0 and 3.
    wanted = torch.zeros(8, 4, 2, dtype=torch.int32)
    wanted[6, 0], wanted[6, 3] = torch.tensor([1, 2]), torch.tensor([5, 6])
    wanted[7, 0], wanted[7, 3] = torch.tensor([3, 4]), torch.tensor([7, 0])
    assert torch.equal(experts_NSK, wanted)
    again = torch.zeros_like(wanted)
    recorder.take(7, again)
    assert not again.any()


def test_experts_have_numbers_of_several_digits() -> None:
    recorder = Recorder()
    recorder.add(Tokens(1, layer=1), torch.tensor([[127, 128], [300, 32_000]]))
    experts_NSK = torch.zeros(1, 2, 2, dtype=torch.int32)
    recorder.take(1, experts_NSK)
    assert experts_NSK.tolist() == [[[128, 129], [301, 32_001]]]


def replay() -> Replay:
    """The choice of a token is 100 layers, 10 sequences, position."""
    made = Replay()
    layer, sequence, position = np.ogrid[:2, :8, :4]
    experts_LNS = 100 * layer + 10 * sequence + position
    made.begin_step((2, 4), experts_LNS.astype(np.int16)[..., None])
    return made


def test_replayed_choices_are_those_of_the_place() -> None:
    chosen_TK = replay().choices(Ends(2, layer=4, find_place=lambda: (0, 6)), 4, 1)
    assert chosen_TK.tolist() == [[160], [170], [163], [173]]
    assert chosen_TK.dtype == torch.int64
    every_second = replay().choices(Tokens(1, layer=2, find_place=lambda: (0, 6)), 2, 2)
    assert every_second.tolist() == [[60], [62]]


def test_segments_take_the_choices_of_their_first_tokens() -> None:
    rule: Any = replay().rule(BySegment(ExpertChoice(1.0, raw), 3))
    assert isinstance(rule, BySegment) and rule.length == 3
    assert rule.rule.chosen(torch.zeros(2, 9), Tokens(1, layer=4)).tolist() == [[100], [103]]


def test_a_rule_without_probs_for_others_choices_is_refused() -> None:
    def own_rule(scores_TE: torch.Tensor, tokens: Tokens) -> Any:
        return None

    with pytest.raises(InputError, match=r"--moe-router-replay is set, but function gives no prob"):
        replay().rule(own_rule)
    assert RouterTrace().rule(own_rule) is own_rule
    assert RouterTrace(replay=replay()).rule(TopK(1)) is not None
