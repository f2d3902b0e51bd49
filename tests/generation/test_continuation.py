"""Texts that one writer continues one after another, with a model that knows nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_parallel.data.tokenizer import NullTokenizer
from moe_parallel.generation.continuation import Continuation, TextWriter
from moe_parallel.generation.decode import Reuse
from moe_parallel.generation.sampling import Sampling
from moe_parallel.layers.past import Past

VOCABULARY, SEQ_LENGTH = 1000, 8
PROMPT = [1, 2]


class Unknowing:
    """A language model for which all tokens but the end of a document are equally probable."""

    device = torch.device("cpu")
    config = SimpleNamespace(training=SimpleNamespace(seq_length=SEQ_LENGTH))

    def next_logits(self, tokens_BS: torch.Tensor, past: Past) -> torch.Tensor:
        return torch.zeros(len(tokens_BS), VOCABULARY - 1)

    def agree(self, tokens: list[int]) -> list[int]:
        return tokens


def writer() -> TextWriter:
    model: Any = Unknowing()
    return TextWriter(model, NullTokenizer(VOCABULARY), Sampling(), Reuse(None), seed=0)


def write(with_one: TextWriter, prompts: int) -> list[str]:
    return with_one.write([PROMPT] * prompts, [Continuation(4)] * prompts, batch_size=2)


def test_an_answer_is_not_drawn_like_the_last_one() -> None:
    """Prompts are numbered from the first to the last, in one call or in several."""
    one = writer()
    texts = write(one, 1) + write(one, 2)
    assert texts == write(writer(), 3)
    assert len(set(texts)) == 3


@pytest.mark.parametrize(("length", "tokens"), [(2, 6), (6, 2), (7, 1)])
def test_a_text_ends_with_the_sequence(length: int, tokens: int) -> None:
    done: list[int] = []
    prompts, limits = [[1] * length], [Continuation(100)]
    (text,) = writer().write(prompts, limits, batch_size=1, done=done.append)
    assert len(text.split()) == tokens and done == [0]
