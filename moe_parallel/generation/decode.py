"""Continues texts token by token, several at a time.

After its first pass a sequence is *settled* if no later token can change the outputs of the tokens
so far. Their keys and values are then kept, and each step computes one token. In some systems a
sequence is settled only after its first segment, or never (`Config.settled_after`). Until then its
tokens are computed again for each new one. So a text is the same with a cache as without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from moe_parallel.config import Config
from moe_parallel.generation.language_model import GenerationModel
from moe_parallel.generation.sampling import Sampler
from moe_parallel.layers.past import Past


def generation_config(config: Config, *, by_prompt: bool) -> Config:
    """The configuration of a model that continues texts, whose attention can keep their keys.

    `by_prompt`: a Lory model merges its experts by the mean of the prompt.
    """
    training = replace(config.training, attention_backend="auto")
    selection = config.selection.routed_by_prompt() if by_prompt else config.selection
    return replace(config, training=training, selection=selection)


@dataclass(frozen=True)
class Reuse:
    """What a step may take from the steps before it."""

    settled_after: int | None  # tokens; None: every step computes all tokens of a sequence
    alone: bool = False  # sequences are not batched, because they would change each other
    by_prompt: bool = False  # experts are merged by the mean of the prompt

    @classmethod
    def of(cls, config: Config, *, cache: bool = True) -> Reuse:
        """The most that a model allows; without `cache`, nothing."""
        by_prompt = config.selection.by_prompt
        settled = 0 if by_prompt else config.settled_after
        return cls(settled if cache else None, config.instances_mix, by_prompt)

    def settles(self, tokens: int) -> bool:
        return self.settled_after is not None and tokens >= self.settled_after


@dataclass
class ContinuedText:
    """A sequence that is continued."""

    number: int
    tokens: list[int]  # the prompt and what was generated
    prompt_length: int


class Generation:
    """Texts that are continued together; they may have different lengths."""

    def __init__(
        self,
        model: GenerationModel,
        prompts: Sequence[Sequence[int]],
        sampler: Sampler,
        reuse: Reuse,
        places: int,
    ) -> None:
        """
        Args:
            prompts: at least one token each.
            places: the greatest length of a sequence with all its tokens.
        """
        self.model = model
        self.sampler = sampler
        self.reuse = reuse
        self.places = places
        self.waiting = [
            ContinuedText(i, list(tokens), len(tokens)) for i, tokens in enumerate(prompts)
        ]
        self.settled: list[ContinuedText] = []  # in the order of the rows of `past`
        self.past: Past | None = None

    def __bool__(self) -> bool:
        """Whether a text is not finished."""
        return bool(self.waiting or self.settled)

    def step(self) -> list[tuple[int, int]]:
        """One more token for each text that is not finished: (number of the text, token)."""
        found = list(self._logits())
        texts = [text for part, _ in found for text in part]
        drawn = self.sampler.draw(
            torch.cat([logits_BV for _, logits_BV in found]),
            [text.number for text in texts],
            [text.tokens for text in texts],
        )
        drawn = self.model.agree(drawn)
        for text, token in zip(texts, drawn, strict=True):
            text.tokens.append(token)
        return [(text.number, token) for text, token in zip(texts, drawn, strict=True)]

    def finish(self, numbers: Sequence[int]) -> None:
        """These texts are complete."""
        done = set(numbers)
        self.waiting = [text for text in self.waiting if text.number not in done]
        rows = [row for row, text in enumerate(self.settled) if text.number not in done]
        if len(rows) == len(self.settled):
            return
        self.settled = [self.settled[row] for row in rows]
        if self.past is not None:
            self.past.keep(rows)
        if not rows:
            self.past = None

    def _logits(self) -> Iterator[tuple[list[ContinuedText], torch.Tensor]]:
        """The logits of the next token: of the settled texts, and of groups of the others."""
        if self.past is not None:
            last = [[text.tokens[-1]] for text in self.settled]
            yield list(self.settled), self.model.next_logits(self._tensor(last), self.past)
        joining: list[tuple[list[ContinuedText], Past]] = []
        for group in list(self._groups()):
            first, length = group[0], len(group[0].tokens)
            settles = self.reuse.settles(length)
            prompt_length = first.prompt_length if self.reuse.by_prompt else None
            past = Past(self.places if settles else length, prompt_length)
            tokens_BS = self._tensor([text.tokens for text in group])
            yield group, self.model.next_logits(tokens_BS, past)
            if settles:
                joining.append((group, past))
        self._join(joining)

    def _groups(self) -> Iterator[list[ContinuedText]]:
        """Waiting texts of equal length, which need no padding."""

        def key(text: ContinuedText) -> tuple[int, ...]:
            own = text.number if self.reuse.alone else 0
            return len(text.tokens), text.prompt_length if self.reuse.by_prompt else 0, own

        for _, group in groupby(sorted(self.waiting, key=key), key):
            yield list(group)

    def _join(self, joining: list[tuple[list[ContinuedText], Past]]) -> None:
        if not joining:
            return
        pasts = [past for _, past in joining]
        texts = [text for group, _ in joining for text in group]
        self.past = Past.joined(pasts if self.past is None else [self.past, *pasts])
        self.settled += texts
        numbers = {text.number for text in texts}
        self.waiting = [text for text in self.waiting if text.number not in numbers]

    def _tensor(self, rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor(rows, device=self.model.device)
