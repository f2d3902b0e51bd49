"""The characters of a text come as soon as they are certain, and end before a stop string."""

import pytest

from moe_parallel.data.tokenizer import NullTokenizer, SentencePiece, Tokenizer
from moe_parallel.generation.text_stream import TextStream
from tests.data.small_text import small_bpe, words


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return small_bpe()


def pieces(stream: TextStream, tokens: list[int]) -> list[str]:
    return [stream.add(token) for token in tokens] + [stream.end()]


def single_bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of one byte each."""
    model = tokenizer.model
    alphabet = "".join(sorted({name for name in model.get_vocab() if len(name) == 1}))
    by_byte = {tokenizer.model.decoder.decode([name]): name for name in alphabet if ord(name) < 127}
    return [model.token_to_id(by_byte[character].replace(" ", "Ġ")) for character in text]


def test_a_text_comes_piece_by_piece(bpe: Tokenizer) -> None:
    text = words(60, seed=9)  # with characters of two to four bytes, which tokens cut
    tokens = bpe.tokenize(text)
    stream = TextStream(bpe)
    given = pieces(stream, tokens)
    assert "".join(given) == text == stream.text
    assert "�" not in "".join(given) and given.count("") < len(given) / 2


@pytest.mark.parametrize("stop", ["ab", "abc", "b", "aab", "abcd", "d"])
def test_nothing_of_a_stop_string_is_shown(bpe: Tokenizer, stop: str) -> None:
    text = "aabaabcdaab"
    stream = TextStream(bpe, [stop, "never"])
    shown = ""
    for token in single_bytes(bpe, text):
        shown += stream.add(token)
        assert text[: text.find(stop)].startswith(shown)
    assert stream.stopped and shown == stream.text == text[: text.find(stop)]
    assert stream.add(bpe.tokenize("more")[0]) == "" and stream.end() == ""


def test_the_first_of_several_stop_strings_ends_the_text(bpe: Tokenizer) -> None:
    stream = TextStream(bpe, ["writes", "reads"])
    for token in bpe.tokenize("the expert reads a token, writes 12"):
        stream.add(token)
    assert stream.text == "the expert "


def test_what_looked_like_a_stop_string_is_shown_in_the_end(bpe: Tokenizer) -> None:
    stream = TextStream(bpe, ["abcd"])
    tokens = single_bytes(bpe, "xabc")
    assert [stream.add(token) for token in tokens] == ["x", "", "", ""]
    assert stream.end() == "abc" and stream.stopped


def test_the_end_of_the_document_ends_the_text(bpe: Tokenizer) -> None:
    stream = TextStream(bpe, ["xyz"])
    tokens = bpe.tokenize("a token x")
    assert "".join(stream.add(token) for token in tokens) == "a token "
    assert stream.add(bpe.eod) == "x" and stream.stopped


def test_bytes_that_are_no_text_are_not_held_back_for_ever(bpe: Tokenizer) -> None:
    second_byte = bpe.tokenize("é")[-1]
    stream = TextStream(bpe)
    assert "".join(stream.add(second_byte) for _ in range(6)).count("�") >= 3
    # A character may begin after them.
    assert "".join(map(stream.add, bpe.tokenize("é and"))).endswith("é and")


def test_numbers_are_separated_from_the_prompt() -> None:
    stream = TextStream(NullTokenizer(50), ["7 8"], prompt=[1, 2])
    assert [stream.add(token) for token in (3, 40, 7, 8)] == [" 3", " 40", " ", ""]
    assert stream.text == " 3 40 "


def test_a_first_space_of_sentencepiece_is_kept(tmp_path) -> None:
    import sentencepiece

    source = tmp_path / "text.txt"
    source.write_text("\n".join(words(50, seed) for seed in range(20)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(source), model_prefix=str(tmp_path / "sp"), vocab_size=60,
        character_coverage=0.9995, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    tokenizer = SentencePiece(tmp_path / "sp.model")
    prompt = tokenizer.tokenize("the expert")
    stream = TextStream(tokenizer, prompt=prompt)
    shown = "".join(pieces(stream, tokenizer.tokenize("reads a token")))
    assert shown == " reads a token"
