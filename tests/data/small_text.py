"""Small texts and datasets for the tests of the data."""

import random
from pathlib import Path

from moe_parallel.data.datasets import Source
from moe_parallel.data.indexed import write_indexed
from moe_parallel.data.tokenizer import FastTokenizer, NullTokenizer, train_byte_bpe

WORDS = "the expert reads a token, writes 12 tokens; naïve façade 漢字 🙂 \t\n".split(" ")

NUMBERS = NullTokenizer(1000)


def words(count: int, seed: int) -> str:
    """`count` words in an order that depends on the seed."""
    choose = random.Random(seed)
    return " ".join(choose.choice(WORDS) for _ in range(count))


def small_bpe(vocab_size: int = 300) -> FastTokenizer:
    return train_byte_bpe([words(400, seed) for seed in range(4)], vocab_size)


def write_texts(
    prefix: Path, texts: list[str], tokenizer: FastTokenizer, **origin: tuple[str, ...]
) -> str:
    documents = [[*ids, tokenizer.eod] for ids in tokenizer.tokenize_all(texts)]
    origin_of = {"tokenizer": tokenizer.fingerprint, **origin}
    write_indexed(prefix, documents, tokenizer.vocab_size, **origin_of)
    return str(prefix)


def write_numbers(prefix: Path, lengths: list[int]) -> str:
    """Documents of consecutive numbers, so that a token gives its position in the file."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    documents = [list(range(s, s + n)) for s, n in zip(starts, lengths, strict=True)]
    write_indexed(prefix, documents, NUMBERS.vocab_size, tokenizer=NUMBERS.fingerprint)
    return str(prefix)


def numbered_sources(folder: Path) -> list[Source]:
    """Two domains of numbers: 400 and 200 tokens for training, 61 and 37 held out."""
    sources = []
    for domain, train, valid in (("a", [90, 10, 300], [20, 41]), ("b", [150, 50], [37])):
        train_prefix = write_numbers(folder / f"{domain}_train", train)
        valid_prefix = write_numbers(folder / f"{domain}_valid", valid)
        sources.append(Source(domain, None, train_prefix, valid_prefix, None))
    return sources
