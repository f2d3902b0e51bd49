"""The report of a study: a page to read, a CSV file to compute with, and figures.

It is created only from the files of the study's runs.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_parallel.analysis.study.design import EQUAL_WITHIN
from moe_parallel.analysis.study.folder import StudyFolder, Sweep
from moe_parallel.analysis.study.measures import (
    LEVEL,
    PairedTest,
    Spread,
    half_width,
    paired_differences,
)
from moe_parallel.analysis.study.results import MEASURED, Comparisons, Result, StudyResults
from moe_parallel.config.message import counted, flag
from moe_parallel.errors import InputError

PARAMETERS = {
    "total": "parameters",
    "active": "active",
    "active_compute": "active, all that computes",
    "flops_per_token": "FLOPs per token",
}
MARK = " †"
NONE = "–"
MOST_TOTALS_DIFFER = 0.01
MOST_TIMES = 3.0  # by which outputs at the start may differ from those of the reference

Format = Callable[[float], str]
_FORMS = {"output_rms": ".3g"}  # of measures that are not near 1


def write_study_report(folder: StudyFolder) -> Path:
    """Write the tables and figures of the finished runs. Returns the page to read, table.md.

    Raises InputError if no run is finished, or if the folder cannot be written.
    """
    from moe_parallel.analysis.study import figures  # matplotlib takes a second

    study = StudyResults.read(folder)
    drawn, pictures = figures.draw_figures(study), folder.path / "figures"
    page = markdown(study)
    page += "".join(f"\n![{name.replace('_', ' ')}](figures/{name}.png)\n" for name in drawn)
    texts = {"table.md": page, "cells.csv": cell_csv(study)}
    try:
        for name, text in texts.items():
            (folder.path / name).write_text(text, encoding="utf-8")
        pictures.mkdir(exist_ok=True)
        for name in figures.FIGURES.keys() - drawn.keys():  # left by an earlier report
            (pictures / f"{name}.png").unlink(missing_ok=True)
        for name, figure in drawn.items():
            figure.savefig(pictures / f"{name}.png", dpi=120)
    except OSError as error:
        raise InputError(
            f"{error.filename}: cannot be written ({error.strerror}): free space, or change the "
            "permissions"
        ) from error
    return folder.path / "table.md"


def cell_csv(study: StudyResults) -> str:
    """A row for each finished run, with the columns of all runs."""
    rows = [
        {"contender": result.name, "seed": seed, **numbers}
        for result in study.results
        for seed, numbers in result.measures.items()
    ]
    text = io.StringIO()
    columns = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def markdown(study: StudyResults) -> str:
    """The report as a page."""
    parts = [
        f"# {study.name}\n",
        f"Mean ± standard deviation over {study.seeds_told} (lowest to highest); {NONE}: the "
        "system does not have it.\n",
        "## Held-out text\n",
        _held_out(study),
        *_differences(study),
        *_comparison_sections(study),
        *_sweep_section(study),
        "## Size and speed\n",
        _costs(study),
        "## Routing\n",
        _routing(study),
        "## What was compared, and what this cannot show\n",
        _bullets(study_notes(study)),
    ]
    return "\n".join(parts)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is aligned to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, rule, *rows]) + "\n"


def parameter_table(parameters: Mapping[str, Mapping[str, Any]]) -> str:
    """The parameters of the contenders, by name."""
    rows = [[name, *_counts(of)] for name, of in parameters.items()]
    return markdown_table(["", *PARAMETERS.values()], rows)


def _counts(parameters: Mapping[str, Any]) -> list[str]:
    values = [parameters.get(key) for key in PARAMETERS]
    return [NONE if value is None else f"{value:,}" for value in values]


def _bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences) + "\n"


def _fixed(number: float, places: int, sign: str = "") -> str:
    """The number with so many decimals; `sign` "+" also shows that of a positive one."""
    rounded = round(number, places) + 0.0  # never -0.000
    return f"{rounded:{sign}.{places}f}".replace("-", "−")


def _with_range(spread: Spread | None, sign: str = "") -> str:
    """`mean ± deviation (lowest to highest)`."""
    if spread is None:
        return NONE
    mean, low, high = (_fixed(value, 3, sign) for value in (spread.mean, spread.low, spread.high))
    return (
        mean if spread.deviation is None else f"{mean} ± {spread.deviation:.3f} ({low} to {high})"
    )


def _plain(spread: Spread | None, shown: Format) -> str:
    if spread is None:
        return NONE
    deviation = "" if spread.deviation is None else f" ± {shown(spread.deviation)}"
    return shown(spread.mean) + deviation


def _held_out(study: StudyResults) -> str:
    """A table with a column for each loss of each domain: first the losses that every system has,
    then those that only some have."""
    told = dict.fromkeys(name for result in study.results for name in result.spreads)
    common = [f"{domain}/{name}" for name in ("loss", "bits_per_byte") for domain in study.domains]
    others = [name for name in told if name.split("/")[0] in study.domains and name not in common]
    columns = [*(name for name in common if name in told), *others]
    rows = [
        [
            result.name + (MARK if result.warnings else ""),
            *(_with_range(result.spreads.get(name)) for name in columns),
        ]
        for result in study.results
    ]
    text = _with_numbers(columns, rows, [len(result.runs) for result in study.results])
    if any(result.warnings for result in study.results):
        text += (
            f"\n{MARK.strip()} Read the note on this system below before you compare its loss.\n"
        )
    return text


def _differences(study: StudyResults) -> list[str]:
    if len(study.results) < 2:
        return []
    columns = [f"{domain}/loss" for domain in study.domains]
    rows, numbers = [], []
    for result in study.results[1:]:
        differences = [_minus_reference(study, result, name) for name in columns]
        rows.append([result.name, *(_with_range(each, "+") for each in differences)])
        numbers.append(len(result.runs.keys() & study.reference.runs.keys()))
    title = f"## Loss minus that of {study.reference.name} with the same seed\n"
    return [title, _with_numbers(columns, rows, numbers)]


def _with_numbers(columns: list[str], rows: list[list[str]], seeds: Sequence[int]) -> str:
    """The table of losses, DOMAIN/LOSS; with a last column for the numbers of seeds of its rows, if
    they differ."""
    units = {"loss": "nats/token", "bits_per_byte": "bits/byte"}
    parts = [name.rpartition("/") for name in columns]
    heads = ["", *(f"{domain}, {units.get(m, m.replace('_', ' '))}" for domain, _, m in parts)]
    if len(set(seeds)) > 1:
        heads = [*heads, "seeds"]
        rows = [[*row, str(number)] for row, number in zip(rows, seeds, strict=True)]
    return markdown_table(heads, rows)


def _minus_reference(study: StudyResults, result: Result, measure: str) -> Spread | None:
    return paired_differences(result.measures, study.reference.measures, measure)


def _costs(study: StudyResults) -> str:
    formats: dict[str, tuple[str, Format]] = {
        "experts_per_token": ("experts per token", "{:.2f}".format),
        "dropped_share": ("choices dropped", "{:.2%}".format),
        "tokens_per_second": ("tokens/s", "{:,.0f}".format),
        "peak_memory_bytes": ("peak memory, MiB", lambda value: f"{value / 2**20:,.0f}"),
    }
    rows = [
        [
            result.name,
            *_counts(result.parameters),
            *(_plain(result.spreads.get(name), shown) for name, (_, shown) in formats.items()),
        ]
        for result in study.results
    ]
    return markdown_table(["", *PARAMETERS.values(), *(head for head, _ in formats.values())], rows)


def _routing(study: StudyResults) -> str:
    columns = {
        "ent_load": "Ent_load, nats",
        "ent_conf": "Ent_conf, nats",
        "max_minus_min_load_sum": "max − min load, summed over layers",
        "mutual_information": "I(expert; domain), nats",
        "utilisation": "utilization",
        "output_rms": "RMS of outputs at the start",
    }
    experts = {r.contender.config.moe.num_experts for r in study.results if not r.is_dense}
    ceilings = [f"ln {n} = {math.log(n):.3f}" for n in sorted(filter(None, experts))]
    rows = [
        [
            result.name,
            *(
                _plain(result.spreads.get(name), f"{{:{_FORMS.get(name, '.3f')}}}".format)
                for name in columns
            ),
        ]
        for result in study.results
    ]
    limit = f"\nThe entropies are at most {' or '.join(ceilings)}.\n" if ceilings else ""
    return markdown_table(["", *columns.values()], rows) + limit


def _comparison_sections(study: StudyResults) -> list[str]:
    """The tests, what they show and do not show, and the terms. Without a margin there are none."""
    if (comparisons := Comparisons.of(study)) is None:
        return []
    first, margin, compared = study.reference.name, comparisons.margin, comparisons.compared
    heads = ["", "mean", "95% interval", "90% interval", "standard deviation", "seeds"]
    heads += ["p of no difference, corrected", f"p of one ≥ {margin:g}", "verdict"]
    rows = []
    by_number: dict[int, list[PairedTest]] = {}
    for name, each in compared.items():
        test = each.test
        by_number.setdefault(test.runs, []).append(test)
        mean, *ends = (
            _fixed(value, 4, "+")
            for value in (test.mean, test.low, test.high, test.low_90, test.high_90)
        )
        row = [name, mean, " to ".join(ends[:2]), " to ".join(ends[2:]), _fixed(test.deviation, 4)]
        p = [f"{each.p:.3g}", f"{test.p_equivalent:.3g}"]
        rows.append([*row, str(test.runs), *p, each.verdict])
    text = "loss" if study.design.judged_by == "loss" else "loss after the first part"
    sentences = [
        *(
            f"**{name}** is reported, not compared: {reason}."
            for name, reason in comparisons.only_reported.items()
        ),
        *(_resolved(by_number[runs], margin) for runs in sorted(by_number)),
        f"The tests compare the held-out {text}, mean over domains, with that of {first} with the "
        f"same seed. Differences are tested at {LEVEL:g}, with Holm's correction for "
        f"{counted(len(compared), 'test')}. Equivalent means within ±{margin:g} nats per token, a "
        "margin stated before the first run. Equivalence is tested for each of them by itself, by "
        f"two one-sided tests at {LEVEL:g}. Not decided: neither a difference nor equivalence is "
        "shown, and they may differ, although no difference was found.",
        "The unit is a seed, which sets the weights and the order of the text. Domains, layers and "
        "evaluations of one run are not repetitions. Intervals hold for other seeds, and only for "
        "this model size, text and number of tokens.",
    ]
    return [
        f"## What the numbers show: loss minus that of {first}\n",
        markdown_table(heads, rows),
        _bullets(sentences),
        f"## Equal terms: {study.design.terms.told}\n",
        _terms(study, comparisons),
    ]


def _resolved(tests: list[PairedTest], margin: float) -> str:
    """What the number of seeds of these tests could resolve."""
    runs = tests[0].runs
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


def _terms(study: StudyResults, comparisons: Comparisons) -> str:
    values, terms, first = study.term_values, study.design.terms, study.reference.name
    rows = []
    for name, value in values.items():
        shown, ratio = NONE, NONE
        if value is not None:
            shown = f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}"
            ratio = f"{value / its:.1%}" if (its := values[first]) else NONE
        rows.append([name, shown, ratio, "no" if name in comparisons.only_reported else "yes"])
    return markdown_table(["", terms.told, f"of {first}'s", "compared"], rows) + (
        f"\nMeasured after training. A contender that differs by more than {EQUAL_WITHIN:.0%} "
        "is reported and not compared.\n"
    )


def _sweep_section(study: StudyResults) -> list[str]:
    """Every loss of the learning-rate grids. Nothing without one."""
    if not study.sweeps:
        return []
    heads = ["", *(f"lr × {factor:.3g}" for factor in study.design.lr_grid)]
    rows, balance = [], []
    for name, sweep in study.sweeps.items():
        further, chosen = NONE, NONE
        if sweep.further is not None:
            further = f"{_loss(sweep, sweep.further)} at {sweep.further:g}"
        if sweep.best is not None:
            chosen = f"{sweep.best:g}" + (" ‡" if sweep.best_is_at_an_edge else "")
        rows.append([name, *(_loss(sweep, rate) for rate in sweep.grid), further, chosen])
        if sweep.option is not None and sweep.best is not None:
            tried = [
                (f"{_fixed(loss, 4)} at" if math.isfinite(loss) else "diverged at") + f" {value:g}"
                for value, loss in sweep.by_value.items()
            ]
            value = "its own" if sweep.best_value is None else f"{sweep.best_value:g}"
            own, shown = _fixed(sweep.losses[sweep.best], 4), value if sweep.is_finished else NONE
            balance.append([name, f"`{flag(sweep.option)}`", own, "; ".join(tried), shown])
    tables = [
        "## Learning rates\n",
        markdown_table([*heads, "further run", "chosen lr"], rows),
        "Held-out loss of the pilot runs, one for each rate, with a seed that no compared run has. "
        "The column × 1 compares the contenders at the rate of the file. Every contender has the "
        "same number of pilot runs. If the best rate is at the edge of the grid, the further run "
        "is beyond that edge, otherwise between the best rate and the better of its neighbors. ‡: "
        "the chosen rate is the lowest or the highest that was tried, so another may be better.\n",
    ]
    if balance:
        heads = ["", "option", "with its own value", "with others", "chosen"]
        tables += ["## Balancing at the chosen rates\n", markdown_table(heads, balance)]
    return tables


def _loss(sweep: Sweep, rate: float) -> str:
    if (loss := sweep.losses.get(rate)) is None:
        return NONE
    if not math.isfinite(loss):
        return "diverged"
    return f"**{_fixed(loss, 4)}**" if rate == sweep.best else _fixed(loss, 4)


def _times(study: StudyResults, result: Result) -> float | None:
    """The outputs at the start over those of the reference."""
    own, its = (each.means.get("output_rms") for each in (result, study.reference))
    return None if own is None or not its else own / its


def study_notes(study: StudyResults) -> list[str]:
    """Notes for the reader, derived from the study's records; the general ones first."""
    runs = [run for result in study.results for run in result.runs.values()]
    terms, first = study.design.terms, study.reference
    training = first.contender.config.training
    tokens = training.train_iters * training.global_batch_size * training.seq_length
    total = first.parameters.get("total")
    size = f"{total / 1e6:.2f}M parameters" if total else "models"
    rate = f" ({tokens / total:.2g} a parameter)" if total else ""
    notes = [
        f"{size}, {tokens:,} tokens{rate}, {study.seeds_told}. These results may not hold at "
        "another size or later in training, and a difference within the spread over seeds proves "
        "nothing. A seed sets the initial weights and the order of the text. Contenders read the "
        "text in the same order; the spread includes both effects.",
        _parameters(study),
        _options(study),
    ]
    by_text: dict[str, list[str]] = {}
    for result in study.results:
        for warning in result.warnings:
            by_text.setdefault(warning, []).append(result.name)
    notes += [f"{', '.join(names)}: {text}." for text, names in by_text.items()]
    times = {result.name: _times(study, result) for result in study.results}
    notes += [
        f"**{name}** starts with outputs of its MoE layers {ratio:.2g} times as large as those of "
        f"{first.name}: a difference of the losses may come from the initial weights."
        for name, ratio in times.items()
        if ratio is not None and not 1 / MOST_TIMES <= ratio <= MOST_TIMES
    ]
    if study.missing:
        missing = ", ".join(f"{cell.contender} (seed {cell.seed})" for cell in study.missing)
        notes.append(f"Not finished, and not in the tables: {missing}.")
    read = {run.measures["consumed_tokens"] for run in runs}
    if len(read) > 1:
        fitted = terms.fits == "iterations"
        why = f", for equal {terms.told}" if fitted else ": NOT an equal comparison"
        notes.append(f"Runs read between {min(read):,} and {max(read):,} tokens{why}.")
    return [
        *notes,
        _machines(study, [attempt for run in runs for attempt in run.attempts]),
        "Losses are means over all held-out tokens that an evaluation reads, which are the same "
        "for every run. Ent_load, Ent_conf and loads are means over layers, in training, over the "
        "end of the run: the last tenth of the logged iterations. Experts per token and "
        "I(expert; domain) are measured on the held-out text, with domains weighted equally.",
        "tokens/s is the median of the logged intervals, without the first tenth, and without "
        "evaluations and checkpoints. Peak RSS is the most memory of the host that the largest "
        "process of a run held at once.",
    ]


def total_difference(totals: Iterable[int]) -> float:
    """(largest - smallest) / smallest."""
    totals = list(totals)
    return max(totals) / min(totals) - 1


def _parameters(study: StudyResults) -> str:
    totals = [r.parameters["total"] for r in study.results if not r.is_dense and r.parameters]
    parts = []
    if len(totals) > 1:
        equal, difference = "", total_difference(totals)
        if difference > MOST_TOTALS_DIFFER:
            fitted = study.design.terms.fits == "width"
            equal = ", on these terms" if fitted else ": NOT an equal comparison"
        parts.append(f"Total parameters differ by at most {difference:.2%}{equal}.")
    if dense := [result.name for result in study.results if result.is_dense]:
        parts.append(
            f"{' and '.join(dense)} has no experts: it is as wide as the experts that a token "
            "uses, so it is equal in active but not in total parameters."
        )
    if decided := [r.name for r in study.results if r.parameters.get(MEASURED) is not None]:
        parts.append(
            f"Active parameters of {' and '.join(decided)} are those at the experts per token that "
            "were measured."
        )
    parts.append(
        "Active parameters are counted in two ways. The second adds the parameters that compute "
        "for every token, although only some of their experts are chosen."
    )
    return " ".join(parts)


def _options(study: StudyResults) -> str:
    told = []
    for result in study.results:
        if own := result.contender.alone:
            words = " ".join(f"`{flag(name)} {value}`" for name, value in own.items())
            told.append(f"{result.name}: {words}")
    text = "Every contender has the options of the study's file"
    if told:
        return f"{text}; different for {'; '.join(told)}."
    return f"{text}, including the learning rate: none was tuned for one system."


def _machines(study: StudyResults, attempts: list[dict[str, Any]]) -> str:
    """The machines and software of the runs. If there are several, speeds are not comparable."""
    attempts.sort(key=lambda attempt: str(attempt["started"]))
    found = Counter(
        f"{each['machine']}; {', '.join(' '.join(pair) for pair in each['software'].items())}"
        for each in attempts
    )
    jobs = max((attempt.get("jobs", 1) for attempt in attempts), default=1)
    how = (
        f"{study.processes} process{'' if study.processes == 1 else 'es'} a run, "
        f"{counted(study.threads, 'thread')} each, "
        + ("one run at a time" if jobs == 1 else f"up to {jobs} runs side by side")
    )
    if len(found) > 1:
        told = "; ".join(f"{text} ({count} starts)" for text, count in found.items())
        return f"More than one machine or version, so speeds cannot be compared: {told}. {how}."
    return f"{'; '.join([*found, how])}."
