"""Texts against a loop by hand, what a terminal shows of them, and chats."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_parallel.hf as hf
from moe_parallel.data.tokenizer import NullTokenizer
from moe_parallel.generation import HELP, Chat, TextWriter, _TextEnds, converse
from tests.data.small_text import small_bpe

VOCABULARY, LENGTH = 20, 16
NUMBERS = NullTokenizer(VOCABULARY)
PROMPTS = [[3, 7], [5, 1, 18, 4, 2], [6, 6, 0, 8, 11], [9, 2, 14, 3, 7, 1, 18, 4, 12], [7] * 13]
GREEDY = {"temperature": 0, "top_k": None, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@cache
def model() -> Any:
    """With ids that no text has, and weights so large that no two tokens are equally probable."""
    torch.manual_seed(5)
    sizes = {"vocab_size": VOCABULARY + 4, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4}
    sizes |= {"moe_intermediate_size": 8, "initializer_range": 1.0, "tie_word_embeddings": False}
    return hf.MoeParallelForCausalLM(hf.MoeParallelConfig(**sizes)).eval()


def writer(sampling: dict[str, Any] | None = None, **more: Any) -> TextWriter:
    return TextWriter(model(), NUMBERS, LENGTH, GREEDY | (sampling or {}), **more)


@torch.no_grad()
def by_hand(prompt: list[int], tokens: int, stops: tuple[str, ...] = ()) -> str:
    """The most probable token again and again, each time from the whole sequence."""
    whole, text = list(prompt), ""
    for _ in range(min(tokens, LENGTH - len(prompt))):
        logits = model()(torch.tensor([whole])).logits[0, -1, :VOCABULARY]
        whole.append(int(logits.argmax()))
        if whole[-1] == NUMBERS.eod:
            break
        text += f" {whole[-1]}"
        if found := [text.index(stop) for stop in stops if stop in text]:
            return text[: min(found)]
    return text


@pytest.mark.parametrize("cache", [True, False])
def test_texts_of_a_batch_are_those_by_hand(cache):
    expected = [by_hand(prompt, 9) for prompt in PROMPTS]
    lengths = [len(text.split()) for text in expected]
    assert lengths[:2] == [9, 9] and lengths[2] == 2 and lengths[4] == LENGTH - 13
    for size in (1, 3):
        done = []
        given = writer(cache=cache)
        assert given.write(PROMPTS, 9, batch_size=size, done=done.append) == expected
        assert sum(done) == len(PROMPTS)


def test_texts_end_before_a_stop_string_and_are_shown_as_they_are_written():
    whole = by_hand(PROMPTS[0], 9)
    stop = " ".join(["", *whole.split()[3:5]])
    (expected,) = [by_hand(PROMPTS[0], 9, (stop,))]
    assert expected and expected != whole
    shown: list[str] = []
    assert writer().write(PROMPTS[:1], 9, [stop], show=shown.append) == [expected]
    assert "".join(shown) == expected and len(shown) > 1
    assert writer().write(PROMPTS, 9, [stop], 4)[0] == expected


def test_what_is_drawn_depends_on_the_seed_and_on_the_answers_before():
    drawn = {"temperature": 1.5, "top_k": 8, "top_p": 0.9, "min_p": 0.01}
    first = writer(drawn, seed=5)
    texts = [first.write(PROMPTS[:1], 9) for _ in range(2)]
    again = writer(drawn, seed=5)
    assert [again.write(PROMPTS[:1], 9) for _ in range(2)] == texts and texts[0] != texts[1]
    assert writer(drawn, seed=6).write(PROMPTS[:1], 9) != texts[0]
    assert writer(drawn | {"top_k": 1}).write(PROMPTS, 9) == writer().write(PROMPTS, 9)
    rarer = writer({"repetition_penalty": 50.0}).write([[3, 7, 9]], 9)[0].split()
    assert len({*rarer, "3", "7", "9"}) == len(rarer) + 3


def test_a_character_of_several_bytes_is_shown_whole_and_a_stop_string_never():
    tokenizer = small_bpe()
    text = "naïve façade 漢字 🙂\nUser: not shown"
    prompt, ids = tokenizer.tokenize("the expert"), tokenizer.tokenize(text)
    shown: list[str] = []
    writer = SimpleNamespace(tokenizer=tokenizer, seq_length=100)
    ends = _TextEnds(writer, [prompt], 90, ["\nUser:"], shown.append)  # type: ignore[arg-type]
    for count in range(1, len(ids) + 1):
        row = torch.tensor([prompt + ids[:count]])
        if bool(ends(row, None)):
            break
        assert "\n" not in shown[-1] and "�" not in shown[-1]
    assert "".join(shown) == ends.texts[0] == "naïve façade 漢字 🙂"


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

    def answer(tokens, stop):
        prompts.append(len(tokens))
        said = next(answers)
        if said is None:
            raise KeyboardInterrupt
        shown.append(f" {said}")
        return f" {said}"

    converse(Chat(), Words(1000), most, read, shown.append, answer)
    return "".join(shown), prompts


def test_questions_answers_and_commands() -> None:
    shown, prompts = talk(["one", "two words"], ["first", "second"])
    assert shown == (f"{HELP}\nUser: one\nModel: first\nUser: two words\nModel: second\nUser: \n")
    assert prompts == [3, 3 + 1 + 4]
    shown, prompts = talk(["a", "/again", "", "/what", "a", "/quit", "never"], ["x", "y"])
    assert prompts == [3, 3]
    assert shown.count(HELP) == 2 and shown.endswith("User: /quit\n")
    shown, prompts = talk(["a", "b"], [None, "y"])
    assert "Model: (stopped)\n" in shown and prompts == [3, 3]
