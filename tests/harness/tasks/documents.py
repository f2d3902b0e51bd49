"""Documents of made-up tasks: what follows a word when counting in a circle of eight."""

from datasets import Dataset, DatasetDict

WORDS = "zero one two three four five six seven".split()


def _rows():
    for n in range(8):
        words = [WORDS[(n + i) % 8] for i in range(12)]
        others = [WORDS[(n + i) % 8] for i in (5, 8, 2)]
        yield {
            "start": " ".join(words[:7]),
            "next": words[7],
            # The right answer has another place in each document.
            "choices": [*others[: n % 4], words[7], *others[n % 4 :]],
            "label": n % 4,
            "text": " ".join(words[:6]),
        }


def rows(**_):
    return DatasetDict(test=Dataset.from_list(list(_rows())))
