"""What the numbers of a study show, and what they do not show, in words."""

from __future__ import annotations

from moe_parallel.analysis.study.comparison import Comparison, Comparisons
from moe_parallel.analysis.study.inference import LEVEL, PairedTest, half_width
from moe_parallel.analysis.study.markdown import signed
from moe_parallel.analysis.study.results import StudyResults
from moe_parallel.config.message import counted


def conclusions(study: StudyResults, comparisons: Comparisons) -> list[str]:
    """Sentences, those that answer the study's question first."""
    return [
        *(_verdict(each) for each in (*comparisons.compared.values(), *comparisons.of_pairs)),
        *(
            f"**{name}** is reported, not compared: {reason}."
            for name, reason in comparisons.only_reported.items()
        ),
        *_pairs(comparisons),
        *_resolution(comparisons),
        _what_was_tested(study, comparisons),
        "The unit is a seed, which sets the weights and the order of the text. Domains, layers and "
        "evaluations of one run are not repetitions. Intervals hold for other seeds, and only for "
        "this model size, text and number of tokens.",
    ]


def _verdict(comparison: Comparison) -> str:
    test, verdict, other = comparison.test, comparison.verdict, comparison.other
    numbers = (
        f"{signed(test.mean)} nats per token on average, 95% interval {signed(test.low)} to "
        f"{signed(test.high)}, corrected p = {comparison.p:.3g}"
    )
    if verdict == "equivalent":
        said = f"is equivalent to {other}"
    elif verdict == "not decided":
        said = (
            f"and {other}: neither a difference nor equivalence is shown. They may differ, "
            "although no difference was found"
        )
    else:
        direction, _, size = verdict.partition(" by ")
        said = f"is {direction} than {other}"
        said += f", by {size}" if size else "; whether by more than the margin is not decided"
    return f"**{comparison.name}** {said} ({numbers})."


def _pairs(comparisons: Comparisons) -> list[str]:
    if not comparisons.pairs:
        return []
    margin, found = f"{comparisons.margin:g}", len(comparisons.equivalent_pairs)
    if found == comparisons.pairs:
        return [
            f"All {found} pairs of compared contenders are equivalent: each 90% interval lies "
            f"inside ±{margin}. This claim needs no correction, because every test must succeed."
        ]
    names = ", ".join(f"{one} and {other}" for one, other in comparisons.equivalent_pairs)
    which = f" ({names}; each by itself, not together)" if found else ""
    return [
        f"{found} of {comparisons.pairs} pairs are equivalent{which}. The study does not show that "
        "all systems are equivalent."
    ]


def _resolution(comparisons: Comparisons) -> list[str]:
    """What the numbers of seeds could resolve: a sentence for each number."""
    by_number: dict[int, list[PairedTest]] = {}
    for each in (*comparisons.compared.values(), *comparisons.of_pairs):
        by_number.setdefault(each.test.runs, []).append(each.test)
    return [_resolved(runs, by_number[runs], comparisons.margin) for runs in sorted(by_number)]


def _resolved(runs: int, tests: list[PairedTest], margin: float) -> str:
    wide, narrow = half_width(runs, 0.95), half_width(runs, 0.90)
    deviations = sorted(test.deviation for test in tests)
    middle = deviations[len(deviations) // 2]
    able = sum(narrow * deviation < margin for deviation in deviations)
    return (
        f"With {runs} seeds a 95% interval is ±{wide:.2f} and a 90% interval ±{narrow:.2f} "
        "standard deviations of a difference. Here a difference has a standard deviation of "
        f"{deviations[0]:.4f} to {deviations[-1]:.4f} nats (median {middle:.4f}). At the median, "
        f"differences below {wide * middle:.4f} cannot be distinguished from 0, and no margin "
        f"below {narrow * middle:.4f} can be met. {able} of {len(tests)} differences could meet "
        f"the margin of {margin:g} if their mean were 0."
    )


def _what_was_tested(study: StudyResults, comparisons: Comparisons) -> str:
    text = "loss" if study.design.judged_by == "loss" else "loss after the first part"
    number = len(comparisons.compared) + len(comparisons.of_pairs)
    pairs = ", and between the pairs that the design states" if comparisons.of_pairs else ""
    return (
        f"The tests compare the held-out {text}, mean over domains, with that of "
        f"{study.reference.name} with the same seed{pairs}. Differences are tested "
        f"at {LEVEL:g}, with Holm's correction for {counted(number, 'test')}. "
        f"Equivalent means within ±{comparisons.margin:g} nats per token, a margin stated before "
        "the first run. Equivalence is tested for each of them by itself, by two one-sided tests "
        f"at {LEVEL:g}."
    )
