"""The tasks of three papers, with the number of examples in the prompt (shots)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PresetTask:
    """A task of the harness."""

    name: str
    shots: int | None  # None: as the task says


@dataclass(frozen=True)
class Preset:
    """The evaluation of a paper."""

    source: str
    tasks: tuple[PresetTask, ...]
    #: What differs from the paper, or what it leaves open; one line each.
    notes: tuple[str, ...] = ()


def _with(shots: int | None, *names: str) -> tuple[PresetTask, ...]:
    return tuple(PresetTask(name, shots) for name in names)


PRESETS = {
    "aoe-paper": Preset(
        "Lv et al. 2025, Autonomy-of-Experts, section 4.1 and Table 2",
        (
            *_with(0, "arc_easy", "piqa", "social_iqa", "winogrande", "hellaswag"),
            *_with(3, "mnli", "mrpc", "qnli", "qqp", "sst2"),
        ),
        ("the average of Table 2 leaves out mrpc and qqp, which the text names",),
    ),
    "dynamic-paper": Preset(
        "Huang et al. 2024, Harder Tasks Need More Experts, Table 1",
        (
            *_with(0, "piqa", "hellaswag", "arc_easy", "commonsense_qa"),
            *_with(None, "bbh"),
        ),
        (
            "the paper evaluates with OpenCompass and gives no number of shots: here none, and for "
            "bbh the three worked examples of its own prompts",
        ),
    ),
    "lory-paper": Preset(
        "Zhong et al. 2024, Lory, section 4.1 and Table 1; shots as in Touvron et al. 2023 (LLaMA "
        "2) and Min et al. 2022",
        (
            *_with(0, "piqa", "social_iqa", "boolq", "hellaswag", "winogrande"),
            *_with(0, "race", "arc_easy", "arc_challenge"),
            *_with(5, "nq_open", "triviaqa"),
            *_with(16, "sst2", "mrpc"),
        ),
        (
            "race is the high-school half; the harness lacks the other one, and AGNews, Amazon, "
            "Yelp and FEVER: give them by --include-path",
            "Min et al. average over several sets of 16 examples; here there is one set",
        ),
    ),
}
