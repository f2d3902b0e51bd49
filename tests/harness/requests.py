"""Requests of each type of the harness, on text of numbers, and who answers them."""

from typing import Any

from lm_eval.api.instance import Instance

from moe_parallel.data.tokenizer import NullTokenizer
from tests.generation.small_models import VOCABULARY

TOKENIZER = NullTokenizer(VOCABULARY)
SEQ_LENGTH = 32


def numbers(count: int, step: int) -> str:
    return " ".join(str(step * i * i % (VOCABULARY - 1)) for i in range(1, count + 1))


#: (context, answer): of unequal lengths; some without a context, one longer than the model reads.
PAIRS = [
    ("3 7", " 1 19"),
    (numbers(9, 4), " 5"),
    (numbers(9, 4), " 6 2 11"),
    ("", "4 8"),
    (numbers(40, 7), " 2 3"),
    ("1 2", " 3"),
    ("\n", "4 8 1"),
    (" ", "9 3"),
]
TEXTS = [numbers(5, 3), numbers(77, 5), numbers(32, 2), numbers(33, 2)]
#: With greedy tokens, up to a stop string if it comes.
PROMPTS = [
    ("3 7", {"until": ["\n"], "max_gen_toks": 6}),
    (numbers(40, 7), {"until": [" 9"], "max_gen_toks": 5, "do_sample": False}),
    (numbers(6, 2), {"until": [" 1", " 4"], "max_gen_toks": 8}),
    (numbers(40, 2), {"until": [], "max_gen_toks": 0}),
]
SAMPLED = ("3 7", {"until": [], "max_gen_toks": 6, "do_sample": True, "temperature": 1.5})


def instances(kind: str, arguments: list[Any]) -> list[Instance]:
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def answers(model: Any) -> dict[str, list[Any]]:
    """What a model of the harness answers to all of them."""
    return {
        "loglikelihood": model.loglikelihood(instances("loglikelihood", PAIRS), True),
        "loglikelihood_rolling": model.loglikelihood_rolling(
            instances("loglikelihood_rolling", [(text,) for text in TEXTS]), True
        ),
        "generate_until": model.generate_until(instances("generate_until", PROMPTS), True),
    }
