"""Names and values of options, formatted for a message of one line."""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from moe_parallel.errors import InputError


def flag(name: str) -> str:
    """The flag of a field name: `num_layers` -> `--num-layers`."""
    return "--" + name.replace("_", "-")


def shown(value: Any) -> str:
    """The repr of `value`, shortened so that it fits in a message of one line."""
    abridged = _Abridged()
    abridged.maxlevel, abridged.maxstring, abridged.maxother = 2, 80, 80
    return abridged.repr(value)


class _Abridged(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python does not print very long integers in decimal; YAML can have them in hexadecimal.
        return super().repr_int(x, level) if x.bit_length() < 1000 else hex(x)[:20] + "..."


def counted(number: int, noun: str) -> str:
    """`1 rank`, `1,200 ranks`; for nouns whose plural ends in s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def as_typed(word: str) -> str:
    """A flag or key as the user typed it, unless it would break the line of the message."""
    return word if word.isprintable() and len(word) <= 80 else shown(word)


def did_you_mean(typed: str, flags: Mapping[str, str]) -> str | None:
    """`did you mean --FLAG?` for the flags that are nearest to one that does not exist, if any are.

    Flags are compared by words, because those of other programs often have a word more or less.
    With w the weight of a word, log(1 + flags / flags with it), and s the similarity of two, a
    flag's nearness is 2 sum(w s of words that both have) / (sum(w typed) + sum(w of the flag)).
    `flags`: their help, in which words count half.
    """
    names = {name: _words(name) for name in flags}
    counts = Counter(word for words in names.values() for word in set(words))
    weight = {word: math.log(1 + len(names) / count) for word, count in counts.items()}
    rare = math.log(1 + len(names))
    asked = _joined(_words(typed.lower()), counts)

    def nearness(name: str) -> float:
        words, told = _joined(names[name], asked), _words(flags[name].lower())
        both = whole = 0.0
        for word in asked:
            near = max(words, key=lambda other: _similarity(word, other))
            alike = _similarity(word, near) or 0.5 * (len(word) > 1 and word in told)
            its = weight.get(near if _similarity(word, near) else word, rare)
            both, whole = both + alike * its, whole + its
        return 2 * both / (whole + sum(weight.get(word, rare) for word in words))

    by_name = {name: nearness(name) for name in names}
    most = max(by_name.values(), default=0.0)
    near = [name for name in by_name if most >= 0.5 and by_name[name] >= 0.85 * most]
    near = sorted(near, key=by_name.__getitem__, reverse=True)[:3]
    return f"did you mean {' or '.join(near)}?" if near else None


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text)


def _joined(words: Sequence[str], known: Collection[str]) -> list[str]:
    """The words, but two in a row as one where that is `known`: topk for top k."""
    found = list(words)
    for pair in pairwise(words):
        if "".join(pair) in known and set(pair) <= set(found):
            found[found.index(pair[0])] = "".join(pair)
            found.remove(pair[1])
    return found


def _similarity(one: str, other: str) -> float:
    """1 for equal words, less for a beginning (len, length) or a slip, 0 for different words."""
    if one == other:
        return 1
    length = min(len(one), len(other))
    if length < 2:
        return 0
    ratio = difflib.SequenceMatcher(None, one, other).ratio()
    begins = length > 2 and one[:length] == other[:length]
    return max(ratio, 0.8) if begins else ratio * (ratio >= 0.75)


def divides(value: int, name: str, divisor: int, divisor_name: str) -> None:
    """Raise InputError unless the option `divisor_name` divides the option `name`."""
    if value % divisor:
        raise InputError(
            f"{flag(name)} is {value}, which {flag(divisor_name)} {divisor} does not divide: "
            f"choose a multiple of {divisor}"
        )
