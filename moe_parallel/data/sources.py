"""The text source of each domain: the embedded corpus, or a --data-path in blend syntax."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_parallel.data.corpus import DOMAINS
from moe_parallel.data.default_corpus import DefaultCorpus
from moe_parallel.errors import InputError


@dataclass(frozen=True)
class Source:
    """One domain's text.

    Attributes:
        domain: name under which its validation is reported.
        weight: share in the training blend, up to a common factor; None: proportional to tokens.
        train_prefix: indexed dataset (path without .bin or .idx) of the training text.
        valid_prefix: indexed dataset of the validation text; the same if `split` divides it.
        split: proportions of one file for training, validation and test, "969,30,1" in
            plain decimals; None: two files.
    """

    domain: str
    weight: float | None
    train_prefix: str
    valid_prefix: str
    split: str | None


def corpus_sources(corpus: DefaultCorpus) -> list[Source]:
    """The two domains of the embedded corpus, with weights proportional to their tokens."""
    return [
        Source(domain, None, corpus.prefix(domain, "train"), corpus.prefix(domain, "valid"), None)
        for domain in DOMAINS
    ]


def blend_sources(data_path: Sequence[str], split: str) -> list[Source]:
    """Read --data-path: one prefix, prefixes, or weight prefix weight prefix ...

    Each prefix is a domain, named after the last part of its path (with a number if it repeats).

    Args:
        data_path: the words of the flag.
        split: up to three numbers, as config.validate accepts them.

    Raises:
        InputError: weights that are missing, not numbers, or not positive.
    """
    words = [word.strip() for word in data_path]
    if not words:
        raise InputError("--data-path is empty: give the prefix of a .bin/.idx pair")
    weights: list[float | None]
    # As in Megatron: every second word is a weight, or none is.
    if len(words) > 1 and any(_number(word) is not None for word in words):
        if len(words) % 2:
            raise InputError(
                f"--data-path {' '.join(words)}: a weight or a prefix is missing; "
                "give weight prefix weight prefix ..."
            )
        prefixes = words[1::2]
        weights = [_weight(*pair) for pair in zip(words[::2], prefixes, strict=True)]
    else:
        weights = [None] * len(words)
        prefixes = words
    names = _unique_names(prefixes)
    return [
        Source(name, weight, prefix, prefix, _plain(split))
        for name, weight, prefix in zip(names, weights, prefixes, strict=True)
    ]


def _plain(split: str) -> str:
    """The proportions as plain decimals, because Megatron would read 1e2 as 1, 2."""
    return ",".join(np.format_float_positional(float(part), trim="-") for part in split.split(","))


def _weight(word: str, prefix: str) -> float:
    weight = _number(word)
    if weight is None or weight <= 0:
        raise InputError(
            f"--data-path: the weight {word!r} of {prefix} is not a number above 0; "
            "give weight prefix weight prefix ..."
        )
    return weight


def _number(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _unique_names(prefixes: Sequence[str]) -> list[str]:
    names: list[str] = []
    for prefix in prefixes:
        stem = Path(prefix).name
        name, count = stem, 1
        while name in names:
            count += 1
            name = f"{stem}_{count}"
        names.append(name)
    return names
