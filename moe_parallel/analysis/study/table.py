"""The results of a study as tables: Markdown to read, CSV and JSON to compute with."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from moe_parallel.analysis.study.comparison import Comparisons
from moe_parallel.analysis.study.comparison_tables import comparison_sections, sweep_section
from moe_parallel.analysis.study.markdown import NONE, Cells, fixed, markdown_table
from moe_parallel.analysis.study.measures import Spread, paired_differences
from moe_parallel.analysis.study.notes import study_notes
from moe_parallel.analysis.study.results import Result, StudyResults
from moe_parallel.analysis.study.starts import starts_section

PARAMETERS = {
    "total": "parameters",
    "active": "active",
    "active_compute": "active, all that computes",
    "flops_per_token": "FLOPs per token",
}
MARK = " †"


def markdown(study: StudyResults) -> str:
    """The report as a page."""
    parts = [
        f"# {study.name}\n",
        f"Mean ± standard deviation over {study.seeds_told} (lowest to highest); {NONE}: the "
        "system does not have it.\n",
        "## Held-out text\n",
        _held_out(study),
        *_differences(study),
        *comparison_sections(study),
        *sweep_section(study),
        "## Size and speed\n",
        _costs(study),
        "## Routing\n",
        _routing(study),
        *starts_section(study),
        "## What was compared, and what this cannot show\n",
        "\n".join(f"- {note}" for note in study_notes(study)) + "\n",
    ]
    return "\n".join(parts)


def parameter_table(parameters: Mapping[str, Mapping[str, Any]]) -> str:
    """The parameters of the contenders, by name, for a terminal."""
    columns = list(PARAMETERS.values())
    width = max(map(len, parameters))
    rows = [f"{'':<{width}}  " + "  ".join(f"{column:>12}" for column in columns)]
    for name, counts in parameters.items():
        numbers = zip(PARAMETERS, columns, strict=True)
        cells = [f"{_count(counts.get(key)):>{max(12, len(title))}}" for key, title in numbers]
        rows.append(f"{name:<{width}}  " + "  ".join(cells))
    return "\n".join(rows)


def contender_csv(study: StudyResults) -> str:
    """A row for each contender, with the mean, _sd, _min and _max of each measure over its runs."""
    rows = []
    for result in study.results:
        row: dict[str, Any] = {"contender": result.name, "system": result.contender.system}
        row |= {f"parameters_{key}": result.parameters.get(key) for key in PARAMETERS}
        row["runs"] = len(result.runs)
        for name, spread in result.spreads.items():
            row |= {name: spread.mean, f"{name}_sd": spread.deviation}
            row |= {f"{name}_min": spread.low, f"{name}_max": spread.high}
        rows.append(row)
    return _csv(rows)


def cell_csv(study: StudyResults) -> str:
    """A row for each finished run."""
    return _csv(
        {"contender": result.name, "seed": seed, **numbers}
        for result in study.results
        for seed, numbers in result.measures.items()
    )


def study_json(study: StudyResults) -> str:
    """The content of the tables, and each run, as JSON."""
    contenders = {
        result.name: {
            "system": result.contender.system,
            "options": result.contender.options,
            "parameters": result.parameters,
            "measures": {k: dataclasses.asdict(spread) for k, spread in result.spreads.items()},
            f"minus_{study.reference.name}": {
                measure: dataclasses.asdict(difference)
                for measure in result.spreads
                if (difference := _minus_reference(study, result, measure)) is not None
            },
            "runs": {
                seed: {"measures": run.measures, "attempts": run.attempts}
                for seed, run in result.runs.items()
            },
        }
        for result in study.results
    }
    comparisons = Comparisons.of(study)
    content = {
        "study": study.name,
        "design": dataclasses.asdict(study.design),
        "contenders": contenders,
        "comparisons": None if comparisons is None else dataclasses.asdict(comparisons),
        "sweeps": {name: sweep.as_json() for name, sweep in study.sweeps.items()},
        "notes": study_notes(study),
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _held_out(study: StudyResults) -> str:
    """A table with a column for each loss of each domain: first the losses that every system has,
    then those that only some have."""
    columns = dict.fromkeys(
        f"{domain}/{measure}" for measure in ("loss", "bits_per_byte") for domain in study.domains
    )
    told = [name for result in study.results for name in result.spreads]
    columns |= dict.fromkeys(name for name in told if name.split("/")[0] in study.domains)
    columns = {name: None for name in columns if name in told}
    heads = [_held_out_title(name) for name in columns]
    rows = [
        [
            result.name + (MARK if result.warnings else ""),
            *(_with_range(result.spreads.get(name), 3) for name in columns),
        ]
        for result in study.results
    ]
    text = _with_numbers(heads, rows, [len(result.runs) for result in study.results])
    if any(result.warnings for result in study.results):
        text += (
            f"\n{MARK.strip()} Read the note on this system below before you compare its loss.\n"
        )
    return text


def _held_out_title(name: str) -> str:
    domain, _, measure = name.rpartition("/")
    units = {"loss": "nats/token", "bits_per_byte": "bits/byte"}
    return f"{domain}, {units.get(measure, measure.replace('_', ' '))}"


def _differences(study: StudyResults) -> list[str]:
    if len(study.results) < 2:
        return []
    columns = [f"{domain}/loss" for domain in study.domains]
    rows, numbers = [], []
    for result in study.results[1:]:
        differences = [_minus_reference(study, result, name) for name in columns]
        rows.append([result.name, *(_with_range(each, 3, sign="+") for each in differences)])
        numbers.append(len(result.runs.keys() & study.reference.runs.keys()))
    title = f"## Loss minus that of {study.reference.name} with the same seed\n"
    return [title, _with_numbers([_held_out_title(name) for name in columns], rows, numbers)]


def _with_numbers(heads: list[str], rows: list[list[str]], seeds: Sequence[int]) -> str:
    """The table; with a last column for the numbers of seeds of its rows, if they differ."""
    if len(set(seeds)) > 1:
        heads = [*heads, "seeds"]
        rows = [[*row, str(number)] for row, number in zip(rows, seeds, strict=True)]
    return markdown_table(["", *heads], rows)


def _minus_reference(study: StudyResults, result: Result, measure: str) -> Spread | None:
    return paired_differences(result.measures, study.reference.measures, measure)


def _costs(study: StudyResults) -> str:
    heads = ["experts per token", "choices dropped", "tokens/s", "peak memory, MiB"]

    def cells(result: Result) -> Cells:
        of = result.spreads.get
        return [
            *(_count(result.parameters.get(key)) for key in PARAMETERS),
            _plain(of("experts_per_token"), lambda value: f"{value:.2f}"),
            _plain(of("dropped_share"), lambda value: f"{value:.2%}"),
            _plain(of("tokens_per_second"), lambda value: f"{value:,.0f}"),
            _plain(of("peak_memory_bytes"), lambda value: f"{value / 2**20:,.0f}"),
        ]

    rows = [[result.name, *cells(result)] for result in study.results]
    return markdown_table(["", *PARAMETERS.values(), *heads], rows)


def _routing(study: StudyResults) -> str:
    columns = {
        "ent_load": "Ent_load, nats",
        "ent_conf": "Ent_conf, nats",
        "max_minus_min_load_sum": "max − min load, summed over layers",
        "mutual_information": "I(expert; domain), nats",
        "utilisation": "utilization",
    }
    experts = {r.contender.config.moe.num_experts for r in study.results if not r.is_dense}
    ceilings = [f"ln {n} = {math.log(n):.3f}" for n in sorted(filter(None, experts))]
    rows = [
        [result.name, *(_plain(result.spreads.get(name), "{:.3f}".format) for name in columns)]
        for result in study.results
    ]
    limit = f"The entropies are at most {' or '.join(ceilings)}.\n" if ceilings else ""
    return markdown_table(["", *columns.values()], rows) + ("\n" + limit if limit else "")


def _with_range(spread: Spread | None, places: int, sign: str = "") -> str:
    def number(value: float) -> str:
        return fixed(value, places, sign)

    if spread is None:
        return NONE
    if spread.deviation is None:
        return number(spread.mean)
    low, high = number(spread.low), number(spread.high)
    return f"{number(spread.mean)} ± {spread.deviation:.{places}f} ({low} to {high})"


def _plain(spread: Spread | None, shown: Callable[[float], str]) -> str:
    if spread is None:
        return NONE
    if spread.deviation is None:
        return shown(spread.mean)
    return f"{shown(spread.mean)} ± {shown(spread.deviation)}"


def _count(number: Any) -> str:
    return NONE if number is None else f"{number:,}"


def _csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """CSV with the columns of the first row, then those that later rows add."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
