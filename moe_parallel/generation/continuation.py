"""Texts that continue prompts, in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.generation.decode import Generation, Reuse
from moe_parallel.generation.language_model import GenerationModel
from moe_parallel.generation.sampling import Sampler, Sampling
from moe_parallel.generation.text_stream import TextStream

#: Called with the number of a prompt and the next certain characters of its text.
Show = Callable[[int, str], object]


def show_nothing(number: int, text: str) -> None:
    pass


@dataclass(frozen=True)
class Continuation:
    """The limits of a text."""

    max_tokens: int
    stops: tuple[str, ...] = ()


class TextWriter:
    """Continues texts with one model."""

    def __init__(
        self,
        model: GenerationModel,
        tokenizer: Tokenizer,
        sampling: Sampling,
        reuse: Reuse,
        seed: int,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.reuse = reuse
        self.seed = seed
        self.seq_length = model.config.training.seq_length
        self._given = 0  # prompts so far: an answer of a chat is not drawn like the last one

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[Continuation],
        batch_size: int,
        show: Show = show_nothing,
        done: Callable[[int], object] = lambda number: None,
    ) -> list[str]:
        """The text after each prompt, without its stop string.

        A text also ends with its document, or when the sequence has the model's --seq-length.

        Args:
            prompts: tokens, from 1 to --seq-length - 1 each.
            limits: of each text. One of 0 tokens is empty.
            batch_size: texts that are continued together.
            show: called whenever characters are certain.
            done: called with the number of each prompt whose text is complete.
        """
        texts = [""] * len(prompts)
        # Texts of similar length share a batch, the longest first: if one needs too much memory,
        # this shows at once.
        order = [i for i, limit in enumerate(limits) if limit.max_tokens]
        order.sort(key=lambda i: -len(prompts[i]))
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            streams = [TextStream(self.tokenizer, limits[i].stops, prompts[i]) for i in batch]
            room = [min(limits[i].max_tokens, self.seq_length - len(prompts[i])) for i in batch]
            generation = Generation(
                self.model,
                [prompts[i] for i in batch],
                Sampler(self.sampling, self.seed, [self._given + i for i in batch]),
                self.reuse,
                max(len(prompts[i]) + n for i, n in zip(batch, room, strict=True)),
            )
            while generation:
                ended = []
                for row, token in generation.step():
                    stream, number = streams[row], batch[row]
                    room[row] -= 1
                    show(number, stream.add(token) + ("" if room[row] else stream.end()))
                    if stream.stopped:
                        texts[number] = stream.text
                        ended.append(row)
                        done(number)
                generation.finish(ended)
        self._given += len(prompts)
        return texts
