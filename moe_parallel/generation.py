"""Texts that continue prompts, and chats: `generate` of transformers on the model of an export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_parallel.data.tokenizer import Tokenizer

#: Takes the next certain characters of a text.
Show = Callable[[str], object]

_UNFINISHED = "�"  # what decoders write for bytes that are not a complete character
_CONTEXT = 8  # tokens of the prompt that are decoded too, because the first piece may lose a space


class TextWriter:
    """Continues texts with one model."""

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        seq_length: int,
        sampling: dict[str, Any],
        *,
        seed: int = 0,
        cache: bool = True,
    ) -> None:
        """
        Args:
            model: a MoeParallelForCausalLM.
            seq_length: the most tokens of a prompt and its text.
            sampling: temperature (0: always the most probable token), top_k, top_p, min_p and
                repetition_penalty of transformers.
            seed: of all that is drawn.
            cache: keep keys and values. Without, a Lory model that can routes segment by segment.
        """
        self.model, self.tokenizer = model, tokenizer
        self.seq_length = seq_length
        self.options: dict[str, Any] = {
            "do_sample": sampling["temperature"] > 0,
            "repetition_penalty": sampling["repetition_penalty"],
            "eos_token_id": tokenizer.eod,
            "pad_token_id": tokenizer.eod,
        }
        if sampling["temperature"] > 0:
            self.options |= {**sampling, "top_k": sampling["top_k"] or 0}
        no_text = range(tokenizer.vocab_size, model.config.vocab_size)
        if no_text:
            self.options["suppress_tokens"] = [*no_text]
        self.cache = cache
        torch.manual_seed(seed)  # once: an answer of a chat is not drawn like the last one

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        stops: Sequence[str] = (),
        batch_size: int = 1,
        show: Show | None = None,
        done: Callable[[int], object] = lambda count: None,
    ) -> list[str]:
        """The text after each prompt, without its stop string.

        A text also ends with its document, or when the sequence has `seq_length` tokens.

        Args:
            prompts: tokens, from 1 to `seq_length` - 1 each.
            tokens: the most of a text.
            batch_size: texts that are continued together.
            show: called whenever characters of the text of a single prompt are certain.
            done: called with the number of texts that have become complete.
        """
        texts = [""] * len(prompts)
        # The longest first: if one needs too much memory, this shows at once.
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            ends = _TextEnds(self, [prompts[i] for i in batch], tokens, stops, show)
            self._generate(ends)
            for number, text in zip(batch, ends.texts, strict=True):
                texts[number] = text
            done(len(batch))
        return texts

    def _generate(self, ends: _TextEnds) -> None:
        from transformers import GenerationConfig, StoppingCriteriaList

        device = self.model.device
        padding = [ends.length - len(prompt) for prompt in ends.prompts]
        rows = [
            [self.tokenizer.eod] * count + [*prompt]
            for count, prompt in zip(padding, ends.prompts, strict=True)
        ]
        mask = torch.arange(ends.length)[None] >= torch.tensor(padding)[:, None]
        # The first tokens merge the experts, and a shorter prompt does not have them all yet.
        prefix = self.model.config.prefix_length or 0
        cache = self.cache and min(map(len, ends.prompts)) >= prefix
        self.model.generate(
            torch.tensor(rows, device=device),
            attention_mask=mask.long().to(device),
            generation_config=GenerationConfig(
                **self.options, max_new_tokens=max(ends.room), use_cache=cache
            ),
            stopping_criteria=StoppingCriteriaList([ends]),
        )


class _TextEnds:
    """Tells `generate` which texts of a batch are complete, and shows the text of a single one.

    The end of a text is not shown while it may be the beginning of a stop string, or of a character
    of several bytes.
    """

    def __init__(
        self,
        writer: TextWriter,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        stops: Sequence[str],
        show: Show | None,
    ) -> None:
        self.tokenizer, self.prompts = writer.tokenizer, prompts
        self.stops, self.show = stops, show
        self.length = max(map(len, prompts))
        self.room = [min(tokens, writer.seq_length - len(prompt)) for prompt in prompts]
        self.texts = [""] * len(prompts)
        self.ended = [False] * len(prompts)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Whether each sequence is complete, bool [B], after one more token of each."""
        for row, ids in enumerate(input_ids[:, self.length :].tolist()):
            if not self.ended[row]:
                self._add(row, ids)
        return torch.tensor(self.ended, device=input_ids.device)

    def _add(self, row: int, ids: list[int]) -> None:
        at_end = ids[-1] == self.tokenizer.eod
        full = at_end or len(ids) == self.room[row]
        if not (full or self.stops or self.show):
            return  # nobody needs the text yet
        context = self.prompts[row][-_CONTEXT:]
        before = len(self.tokenizer.detokenize(context))
        text = self.tokenizer.detokenize([*context, *(ids[:-1] if at_end else ids)])[before:]
        found = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        text = text[: min(found, default=None)]
        self.ended[row] = full or bool(found)
        if self.show is not None:
            certain = text if self.ended[row] else self._certain(text)
            self.show(certain[len(self.texts[row]) :])
            text = certain
        self.texts[row] = text

    def _certain(self, text: str) -> str:
        # A character has at most four bytes: the last three of these may begin one.
        text = text[: max(len(text.rstrip(_UNFINISHED)), len(text) - 3)]
        longest = max(map(len, self.stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return text[:-length]
        return text


@dataclass
class Chat:
    """A chat as one text, in which each line begins with the name of its speaker:

        INTRODUCTION
        User: the first question
        Model: the first answer
        User: the second question
        Model:

    A model that has read such texts answers in this form. A pretrained one continues the text as
    it likes.
    """

    introduction: str = ""
    user: str = "User"
    model: str = "Model"
    turns: list[tuple[str, str]] = field(default_factory=list)  # question, answer

    @property
    def stop(self) -> str:
        """Where an answer ends: at the next line of the user."""
        return f"\n{self.user}:"

    def prompt(self, question: str, first: int = 0) -> str:
        """The text that the model continues. `first`: the first turn that it contains."""
        lines = [self.introduction] if self.introduction else []
        for asked, answered in self.turns[first:]:
            lines += [f"{self.user}: {asked}", f"{self.model}: {answered}"]
        return "\n".join([*lines, f"{self.user}: {question}", f"{self.model}:"])

    def fitting(self, question: str, tokenizer: Tokenizer, most: int) -> tuple[list[int], int]:
        """The tokens of the prompt with as many turns as fit, and the number of those left out.

        If the question alone does not fit into `most` tokens, there are none.
        """
        for first in range(len(self.turns) + 1):
            tokens = [*tokenizer.beginning, *tokenizer.tokenize(self.prompt(question, first))]
            if len(tokens) <= most:
                return tokens, first
        return [], len(self.turns)


HELP = "/again forgets the chat, /quit or Ctrl-D ends it, Ctrl-C stops an answer"


def converse(
    chat: Chat,
    tokenizer: Tokenizer,
    most: int,
    read: Callable[[str], str],
    write: Callable[[str], object],
    answer: Callable[[list[int], str], str],
) -> None:
    """Ask and answer until the user ends the chat.

    Args:
        most: tokens of a prompt.
        read: shows a text and returns a line of the user; EOFError: there is none.
        write: shows a text.
        answer: from the tokens of the prompt and the stop string to the text, shown meanwhile.
    """
    write(HELP + "\n")
    while True:
        try:
            question = read(f"{chat.user}: ").strip()
        except EOFError:
            write("\n")
            return
        if question == "/quit":
            return
        if question == "/again":
            chat.turns.clear()
        elif question.startswith("/"):
            write(HELP + "\n")
        elif question:
            tokens, forgotten = chat.fitting(question, tokenizer, most)
            if not tokens:
                write(f"(too long: the model reads {most} tokens)\n")
                continue
            if forgotten:
                write(f"(the first {forgotten} of {len(chat.turns)} turns no longer fit)\n")
                del chat.turns[:forgotten]
            write(f"{chat.model}:")
            try:
                said = answer(tokens, chat.stop).strip()
            except KeyboardInterrupt:
                write(" (stopped)\n")
                continue
            write("\n")
            chat.turns.append((question, said))
