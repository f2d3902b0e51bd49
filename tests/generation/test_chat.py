"""A chat: its text, its limits, and the commands of the user."""

import itertools

from moe_parallel.data.tokenizer import NullTokenizer
from moe_parallel.generation.chat import HELP, Chat, converse


def test_the_text_of_a_chat() -> None:
    chat = Chat("A helpful model.", "User", "Model")
    assert chat.prompt("hello") == "A helpful model.\nUser: hello\nModel:"
    chat.turns.append(("hello", "hi"))
    assert chat.prompt("and?") == ("A helpful model.\nUser: hello\nModel: hi\nUser: and?\nModel:")
    assert chat.stops == ("\nUser:",)
    assert Chat().prompt("x") == "User: x\nModel:"


class Words(NullTokenizer):
    """A token for each word."""

    def tokenize(self, text: str) -> list[int]:
        return list(range(len(text.split())))


def test_the_oldest_turns_are_left_out() -> None:
    chat = Chat("Begin.")
    chat.turns += [("a b", "c"), ("d", "e")]
    words = Words(100)
    # Begin. | User: a b Model: c | User: d Model: e | User: q Model:
    assert chat.fitting("q", words, 13) == (list(range(13)), 0)
    assert chat.fitting("q", words, 12) == (list(range(8)), 1)
    assert chat.fitting("q", words, 4) == (list(range(4)), 2)
    assert chat.fitting("q", words, 3) == ([], 2)


def talk(lines, answers, most=100):
    """What the terminal shows, and the prompts that the model was given."""
    shown, prompts = [], []
    lines, answers = iter(lines), iter(answers)

    def read(prompt):
        line = next(lines, None)
        shown.append(prompt + (line or ""))
        if line is None:
            raise EOFError
        shown.append("\n")
        return line

    def answer(tokens, stops):
        prompts.append(len(tokens))
        said = next(answers)
        if said is None:
            raise KeyboardInterrupt
        shown.append(f" {said}")
        return f" {said}"

    converse(Chat(), Words(1000), most, read, shown.append, answer)
    return "".join(shown), prompts


def test_questions_and_answers() -> None:
    shown, prompts = talk(["one", "two words"], ["first", "second"])
    assert shown == (f"{HELP}\nUser: one\nModel: first\nUser: two words\nModel: second\nUser: \n")
    assert prompts == [3, 3 + 1 + 4]


def test_commands() -> None:
    shown, prompts = talk(["a", "/again", "", "/what", "a", "/quit", "never"], ["x", "y"])
    assert prompts == [3, 3]
    assert shown.count(HELP) == 2 and shown.endswith("User: /quit\n")


def test_a_stopped_answer_is_forgotten() -> None:
    shown, prompts = talk(["a", "b"], [None, "y"])
    assert "Model: (stopped)\n" in shown and prompts == [3, 3]


def test_a_long_chat_forgets_its_beginning_and_says_so() -> None:
    shown, prompts = talk(["a", "b", "c"], itertools.repeat("x"), most=7)
    assert prompts == [3, 7, 7]
    assert "(the first 1 of 2 turns no longer fit)\n" in shown
    shown, prompts = talk(["a b c d e f g"], [], most=7)
    assert prompts == [] and "(too long: the model reads 7 tokens)\n" in shown
