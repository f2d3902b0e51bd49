"""What the numbers of a study allow to say, and what not, in words."""

from __future__ import annotations

from moe_parallel.analysis.study.comparison import Comparison, Comparisons
from moe_parallel.analysis.study.inference import LEVEL, PairedTest, half_width
from moe_parallel.analysis.study.markdown import signed
from moe_parallel.analysis.study.results import StudyResults


def conclusions(study: StudyResults, comparisons: Comparisons) -> list[str]:
    """Sentences, those that answer the study's question first."""
    return [
        *(_verdict(each, study.reference.name) for each in comparisons.compared.values()),
        *(
            f"**{name}** is reported, not compared: {reason}."
            for name, reason in comparisons.only_reported.items()
        ),
        *_pairs(comparisons),
        *_resolution(comparisons),
        _what_was_tested(study, comparisons),
        "A seed is the unit: it sets weights and order of the text. Domains, layers and "
        "evaluations of one run are no repetitions. Intervals hold for this model size, text and "
        "number of tokens, and for other seeds; for nothing else.",
    ]


def _verdict(comparison: Comparison, first: str) -> str:
    test, verdict = comparison.test, comparison.verdict
    numbers = (
        f"{signed(test.mean)} nats per token on average, 95 % interval {signed(test.low)} to "
        f"{signed(test.high)}, corrected p = {comparison.p:.3g}"
    )
    if verdict == "equivalent":
        said = f"is equivalent to {first}"
    elif verdict == "not decided":
        said = (
            f"and {first}: neither a difference nor equivalence is shown. That no difference was "
            "found does not make them equal"
        )
    else:
        direction, _, size = verdict.partition(" by ")
        said = f"is {direction} than {first}"
        said += f", by {size}" if size else "; whether by more than the margin is not decided"
    return f"**{comparison.name}** {said} ({numbers})."


def _pairs(comparisons: Comparisons) -> list[str]:
    if not comparisons.pairs:
        return []
    margin, found = f"{comparisons.margin:g}", len(comparisons.equivalent_pairs)
    if found == comparisons.pairs:
        return [
            f"All {found} pairs of compared contenders are equivalent: each 90 % interval lies "
            f"inside ±{margin}. This claim needs no correction, because every test must succeed."
        ]
    names = ", ".join(f"{one} and {other}" for one, other in comparisons.equivalent_pairs)
    which = f" ({names}; each by itself, not together)" if found else ""
    return [
        f"{found} of {comparisons.pairs} pairs are equivalent{which}. That all rules are "
        "equivalent may not be said."
    ]


def _resolution(comparisons: Comparisons) -> list[str]:
    """What the numbers of seeds could resolve: a sentence for each number."""
    by_number: dict[int, list[PairedTest]] = {}
    for each in comparisons.compared.values():
        by_number.setdefault(each.test.runs, []).append(each.test)
    return [_resolved(runs, by_number[runs], comparisons.margin) for runs in sorted(by_number)]


def _resolved(runs: int, tests: list[PairedTest], margin: float) -> str:
    wide, narrow = half_width(runs, 0.95), half_width(runs, 0.90)
    deviations = sorted(test.deviation for test in tests)
    middle = deviations[len(deviations) // 2]
    able = sum(narrow * deviation < margin for deviation in deviations)
    return (
        f"With {runs} seeds an interval of 95 % is ±{wide:.2f} and one of 90 % ±{narrow:.2f} "
        "standard deviations of a difference. Here a difference has a standard deviation of "
        f"{deviations[0]:.4f} to {deviations[-1]:.4f} nats, {middle:.4f} in the middle: in the "
        f"middle, differences below {wide * middle:.4f} cannot be told from none, and no margin "
        f"below {narrow * middle:.4f} can be met. The margin of {margin:g} could be met by {able} "
        f"of {len(tests)} contenders, if their mean difference were 0."
    )


def _what_was_tested(study: StudyResults, comparisons: Comparisons) -> str:
    text = "loss" if study.design.judged_by == "loss" else "loss after the first part"
    return (
        f"Tested is the held-out {text}, mean over domains, minus that of {study.reference.name} "
        f"with the same seed. That one of {len(comparisons.compared)} differs is tested at "
        f"{LEVEL:g} for all together (Holm). Equivalent means within ±{comparisons.margin:g} nats "
        f"per token, stated before the first run: two one-sided tests at {LEVEL:g}, for each "
        "contender by itself."
    )
