"""A chat as one text, in which each line begins with the name of its speaker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moe_parallel.data.tokenizer import Tokenizer


@dataclass
class Chat:
    """The turns so far, and the prompt that they make:

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
    def stops(self) -> tuple[str, ...]:
        """Where an answer ends: at the next line of the user."""
        return (f"\n{self.user}:",)

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

    def forget(self) -> None:
        """Begin again."""
        self.turns.clear()


#: (tokens of the prompt, stop strings) -> the answer; shows it meanwhile.
Answer = Callable[[list[int], Sequence[str]], str]

HELP = "/again forgets the chat, /quit or Ctrl-D ends it, Ctrl-C stops an answer"


def converse(
    chat: Chat,
    tokenizer: Tokenizer,
    most: int,
    read: Callable[[str], str],
    write: Callable[[str], object],
    answer: Answer,
) -> None:
    """Ask and answer until the user ends the chat.

    Args:
        most: tokens of a prompt.
        read: shows a text and returns a line of the user; EOFError: there is none.
        write: shows a text.
        answer: the model.
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
            chat.forget()
        elif question.startswith("/"):
            write(HELP + "\n")
        elif question:
            _turn(chat, question, tokenizer, most, write, answer)


def _turn(
    chat: Chat,
    question: str,
    tokenizer: Tokenizer,
    most: int,
    write: Callable[[str], object],
    answer: Answer,
) -> None:
    tokens, forgotten = chat.fitting(question, tokenizer, most)
    if not tokens:
        write(f"(too long: the model reads {most} tokens)\n")
        return
    if forgotten:
        write(f"(the first {forgotten} of {len(chat.turns)} turns no longer fit)\n")
        del chat.turns[:forgotten]
    write(f"{chat.model}:")
    try:
        said = answer(tokens, chat.stops).strip()
    except KeyboardInterrupt:
        write(" (stopped)\n")
        return
    write("\n")
    chat.turns.append((question, said))
