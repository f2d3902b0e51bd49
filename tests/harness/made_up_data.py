"""Rows with the columns of the data sets of the presets. Each has a marker: item0, item1, ..."""

from collections.abc import Callable
from typing import Any

from datasets import Dataset, DatasetDict

ROWS = 40


def _choices(labels: str) -> dict[str, list[str]]:
    return {"text": [f"answer {label}" for label in labels], "label": list(labels)}


def _race(marker: str, number: int) -> dict[str, Any]:
    problem = {"question": "What is it", "options": ["a", "b", "c", "d"], "answer": "B"}
    return {"article": marker, "problems": str([problem])}


Row = Callable[[str, int], dict[str, Any]]
#: By the path of the data set, or by the path and its part.
DATA: dict[str, Row] = {
    "allenai/ai2_arc": lambda marker, number: {
        "question": marker,
        "choices": _choices("ABCD"),
        "answerKey": "ABCD"[number % 4],
    },
    "baber/piqa": lambda marker, number: {
        "goal": marker,
        "sol1": "do this",
        "sol2": "do that",
        "label": number % 2,
    },
    "lighteval/siqa": lambda marker, number: {
        "context": marker,
        "question": "Why?",
        "answerA": "a",
        "answerB": "b",
        "answerC": "c",
        "label": str(1 + number % 3),
    },
    "allenai/winogrande": lambda marker, number: {
        "sentence": f"{marker}: the box did not fit because _ was large.",
        "option1": "it",
        "option2": "the bag",
        "answer": str(1 + number % 2),
    },
    "Rowan/hellaswag": lambda marker, number: {
        "activity_label": marker,
        "ctx_a": "A man sits.",
        "ctx_b": "he",
        "endings": ["stands.", "runs.", "eats.", "sleeps."],
        "label": str(number % 4),
    },
    "nyu-mll/glue mnli": lambda marker, number: {
        "premise": marker,
        "hypothesis": "It rains.",
        "label": number % 3,
    },
    "nyu-mll/glue mrpc": lambda marker, number: {
        "sentence1": marker,
        "sentence2": "It rains.",
        "label": number % 2,
    },
    "nyu-mll/glue qnli": lambda marker, number: {
        "question": marker,
        "sentence": "It rains.",
        "label": number % 2,
    },
    "nyu-mll/glue qqp": lambda marker, number: {
        "question1": marker,
        "question2": "Does it rain?",
        "label": number % 2,
    },
    "nyu-mll/glue sst2": lambda marker, number: {"sentence": marker, "label": number % 2},
    "tau/commonsense_qa": lambda marker, number: {
        "question": marker,
        "choices": _choices("ABCDE"),
        "answerKey": "ABCDE"[number % 5],
    },
    "SaylorTwift/bbh": lambda marker, number: {"input": marker, "target": "yes"},
    "aps/super_glue": lambda marker, number: {
        "passage": marker,
        "question": "is it so",
        "label": number % 2,
    },
    "EleutherAI/race": _race,
    "google-research-datasets/nq_open": lambda marker, number: {
        "question": marker,
        "answer": ["rain"],
    },
    "mandarjoshi/trivia_qa": lambda marker, number: {
        "question": marker,
        "answer": {"aliases": ["rain"], "value": "rain"},
    },
}


def load(path: str, name: str | None = None, **kwargs: Any) -> DatasetDict:
    """In place of datasets.load_dataset. KeyError: the preset reads data that is not listed."""
    row = DATA.get(f"{path} {name}") or DATA[path]
    splits = ("train", "validation", "validation_matched", "test")
    return DatasetDict(
        {
            split: Dataset.from_list([row(f"item{number}", number) for number in range(ROWS)])
            for split in splits
        }
    )
