"""Notes for the reader of a study, derived from the study's records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moe_parallel.analysis.study.results import MEASURED, Run, StudyResults
from moe_parallel.analysis.study.starts import unequal_starts
from moe_parallel.config.message import flag

MOST_TOTALS_DIFFER = 0.01
IDLE_CORES = 0.1  # a smaller load by other processes is not reported


def study_notes(study: StudyResults) -> list[str]:
    """The notes as sentences, the general ones first."""
    return [
        _size(study),
        _parameters(study),
        *_options(study),
        *_warnings(study),
        *unequal_starts(study),
        *_missing(study),
        *_tokens(study),
        *_machines(study),
        *_other_work(study),
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


def _size(study: StudyResults) -> str:
    config = study.reference.contender.config
    training = config.training
    tokens = training.train_iters * training.global_batch_size * training.seq_length
    total = study.reference.parameters.get("total")
    size = f"{total / 1e6:.2f}M parameters" if total else "models"
    rate = f" ({tokens / total:.2g} a parameter)" if total else ""
    return (
        f"{size}, {tokens:,} tokens{rate}, {study.seeds_told}. These results may not hold at "
        "another size or later in training, and a difference within the spread over seeds proves "
        "nothing. A seed sets the initial weights and the order of the text. Contenders read the "
        "text in the same order; the spread includes both effects."
    )


def _parameters(study: StudyResults) -> str:
    totals = [r.parameters["total"] for r in study.results if not r.is_dense and r.parameters]
    parts = []
    if len(totals) > 1:
        difference = total_difference(totals)
        told = (
            ": NOT an equal comparison" if study.design.terms.equal_totals else ", on these terms"
        )
        equal = "" if difference <= MOST_TOTALS_DIFFER else told
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


def _options(study: StudyResults) -> list[str]:
    told = []
    for result in study.results:
        if own := result.contender.alone:
            words = " ".join(f"`{flag(name)} {value}`" for name, value in own.items())
            told.append(f"{result.name}: {words}")
    text = "Every contender has the options of the study's file"
    if told:
        return [f"{text}; different for {'; '.join(told)}."]
    return [f"{text}, including the learning rate: none was tuned for one system."]


def _warnings(study: StudyResults) -> list[str]:
    by_text: dict[str, list[str]] = {}
    for result in study.results:
        for warning in result.warnings:
            by_text.setdefault(warning, []).append(result.name)
    return [f"{', '.join(names)}: {text}." for text, names in by_text.items()]


def _missing(study: StudyResults) -> list[str]:
    if not study.missing:
        return []
    runs = ", ".join(f"{cell.contender} (seed {cell.seed})" for cell in study.missing)
    return [f"Not finished, and not in the tables: {runs}."]


def _tokens(study: StudyResults) -> list[str]:
    read = {run.measures["consumed_tokens"] for run in _runs(study)}
    if len(read) == 1:
        return []
    terms = study.design.terms
    why = ": NOT an equal comparison" if terms.equal_tokens else f", for equal {terms.told}"
    return [f"Runs read between {min(read):,} and {max(read):,} tokens{why}."]


def _machines(study: StudyResults) -> list[str]:
    """The machines and software of the runs. If there are several, speeds are not comparable."""
    found: dict[str, int] = {}
    for attempt in _attempts(study):
        versions = [f"{name} {version}" for name, version in attempt["software"].items()]
        text = f"{attempt['machine']}; {', '.join(versions)}"
        found[text] = found.get(text, 0) + 1
    jobs = max((attempt.get("jobs", 1) for attempt in _attempts(study)), default=1)
    how = (
        f"{_number(study.processes, 'process', 'processes')} a run, "
        f"{_number(study.threads, 'thread', 'threads')} each, "
        + ("one run at a time" if jobs == 1 else f"up to {jobs} runs side by side")
    )
    if len(found) > 1:
        told = "; ".join(f"{text} ({count} starts)" for text, count in found.items())
        return [f"More than one machine or version, so speeds cannot be compared: {told}. {how}."]
    return [f"{'; '.join([*found, how])}."]


def _other_work(study: StudyResults) -> list[str]:
    attempts = _attempts(study)
    if not attempts:
        return []
    loads = [attempt["load_average"] for attempt in attempts]
    others = [attempt["other_cores"] for attempt in attempts]
    text = f"Load average when the first run began: {loads[0]:.2f}."
    if max(others) > IDLE_CORES:
        mean = sum(others) / len(others)
        text += (
            f" Other work took {mean:.2f} cores on average and {max(others):.2f} during one run: "
            "it lowered the speeds, but did not change the losses."
        )
        if any(attempt.get("jobs", 1) > 1 for attempt in attempts):
            text += " Other runs of the study at the same time count as such work."
    else:
        text += f" Other work took at most {max(others):.2f} cores during a run."
    return [text]


def _attempts(study: StudyResults) -> list[dict[str, Any]]:
    """The attempts of all finished runs, in order of their start."""
    attempts = [attempt for run in _runs(study) for attempt in run.attempts]
    return sorted(attempts, key=lambda attempt: str(attempt["started"]))


def _runs(study: StudyResults) -> list[Run]:
    return [run for result in study.results for run in result.runs.values()]


def _number(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"
