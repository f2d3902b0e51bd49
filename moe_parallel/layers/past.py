"""The tokens before those of a forward pass: what attention and segments keep of them.

Megatron-Core has inference contexts for this purpose. Its static one keeps one length for all
sequences of a batch, and its dynamic one needs a GPU and flash attention. Neither knows segments.

Shape suffixes: S new tokens of a sequence, B sequences, P places for tokens, G key/value heads of
this rank, C width of a head, T = S * B tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_parallel.selection.choices import Choices
from moe_parallel.selection.segments import BySegment, RunningSegments
from moe_parallel.selection.tokens import Tokens


@dataclass
class KeysAndValues:
    """The keys and values of one layer, with places for those of later tokens."""

    k_BPGC: torch.Tensor
    v_BPGC: torch.Tensor


class Past:
    """What a model keeps of B sequences.

    A new Past is empty, and the first forward pass with it may have any number S of tokens; all
    sequences then have this length. Each later pass has one token of each sequence, at a place
    of its own.
    """

    def __init__(self, places: int, prompt_length: int | None = None) -> None:
        """
        Args:
            places: the greatest number of tokens of a sequence.
            prompt_length: the number of first tokens whose mean merges the experts for all that
                follows, in systems that can do so; None: as in the evaluation of a text.
        """
        self.places = places
        self.prompt_length = prompt_length
        self.length_B: torch.Tensor | None = None  # int64: the tokens of each sequence; None: none
        self.longest = 0  # at least the greatest of them, known without waiting for a GPU
        self.attention: dict[int, KeysAndValues] = {}  # by the number of the layer
        self.segments: dict[int, RunningSegments] = {}
        self.by_prompt = prompt_length is not None
        #: By layer: the matrices of the merged experts of each sequence, while they stay the same.
        self.merged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def is_empty(self) -> bool:
        return self.length_B is None

    def extend(
        self, layer: int, k_SBGC: torch.Tensor, v_SBGC: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps the new keys and values; returns those of all tokens: [B, P', G, C] twice.

        P' is `longest` and the new tokens. Places that hold no token yet contain zeros.
        """
        if self.length_B is None:
            batch, tokens = k_SBGC.shape[1], len(k_SBGC)
            shape = (batch, self.places, *k_SBGC.shape[2:])
            kept = KeysAndValues(k_SBGC.new_zeros(shape), v_SBGC.new_zeros(shape))
            kept.k_BPGC[:, :tokens] = k_SBGC.transpose(0, 1)
            kept.v_BPGC[:, :tokens] = v_SBGC.transpose(0, 1)
            self.attention[layer] = kept
        else:
            assert len(k_SBGC) == 1, "one token of each sequence at a time"
            kept = self.attention[layer]
            rows = torch.arange(len(self.length_B), device=self.length_B.device)
            kept.k_BPGC[rows, self.length_B] = k_SBGC[0]
            kept.v_BPGC[rows, self.length_B] = v_SBGC[0]
        places = self.longest + len(k_SBGC)
        return kept.k_BPGC[:, :places], kept.v_BPGC[:, :places]

    def grow(self, tokens_BS: torch.Tensor) -> None:
        """Called after a pass through all layers."""
        sequences, tokens = tokens_BS.shape
        if self.length_B is None:
            self.length_B = torch.full((sequences,), tokens, device=tokens_BS.device)
        else:
            self.length_B = self.length_B + 1
        self.longest += tokens

    def keep(self, rows: Sequence[int]) -> None:
        """Forgets all sequences but those with these numbers."""
        assert self.length_B is not None
        index = torch.tensor(rows, dtype=torch.int64, device=self.length_B.device)
        self.length_B = self.length_B[index]
        for each in self.attention.values():
            each.k_BPGC, each.v_BPGC = each.k_BPGC[index], each.v_BPGC[index]
        self.segments = {layer: each.rows(index) for layer, each in self.segments.items()}
        self.merged.clear()

    @staticmethod
    def joined(parts: Sequence[Past]) -> Past:
        """The sequences of several, one after another; all have the same number of places."""
        first = parts[0]
        if len(parts) == 1:
            return first
        whole = Past(first.places)
        whole.by_prompt = first.by_prompt
        whole.length_B = torch.cat([part.length_B for part in parts if part.length_B is not None])
        whole.longest = max(part.longest for part in parts)
        whole.attention = {
            layer: KeysAndValues(
                torch.cat([part.attention[layer].k_BPGC for part in parts]),
                torch.cat([part.attention[layer].v_BPGC for part in parts]),
            )
            for layer in first.attention
        }
        whole.segments = {
            layer: RunningSegments.joined([part.segments[layer] for part in parts])
            for layer in first.segments
        }
        return whole


@dataclass(frozen=True)
class RememberedSegments:
    """A rule on segments, for sequences that grow by one token at a time."""

    rule: BySegment
    past: Past
    layer: int

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        if self.past.is_empty:
            scores_SBE = scores_TE.unflatten(0, (-1, tokens.num_sequences))
            running = RunningSegments.after(scores_SBE, self.rule.length, only_first=False)
            self.past.segments[self.layer] = running
            return self.rule(scores_TE, tokens)
        running = self.past.segments[self.layer]
        choices = self.rule.rule(running.mean_BX, tokens)
        running.add(scores_TE)
        return choices
