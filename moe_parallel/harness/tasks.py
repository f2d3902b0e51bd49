"""The tasks of lm-evaluation-harness: found by name, loaded, and run; and those of three papers."""

from __future__ import annotations

import difflib
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from tqdm import tqdm

from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional


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
        (*_with(0, "piqa", "hellaswag", "arc_easy", "commonsense_qa"), *_with(None, "bbh")),
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


@dataclass(frozen=True)
class Wanted:
    """What a user asks for."""

    tasks: tuple[PresetTask, ...]
    folders: tuple[str, ...] = ()  # with task files
    limit: int | None = None  # documents of each task; None: all
    bootstrap: int = 1000  # resamples for the standard errors of metrics without a formula


def wanted_tasks(names: Sequence[str], preset: str | None, shots: int | None) -> list[PresetTask]:
    """The tasks of --tasks and --preset. Raises InputError."""
    tasks: list[PresetTask] = []
    if preset is not None:
        if preset not in PRESETS:
            raise InputError(f"--preset {preset} is unknown: choose from {', '.join(PRESETS)}")
        tasks += PRESETS[preset].tasks
    tasks += [PresetTask(name, None) for name in names]
    if shots is not None:
        tasks = [PresetTask(task.name, shots) for task in tasks]
    twice = [task.name for i, task in enumerate(tasks) if task in tasks[:i]]
    if twice:
        raise InputError(f"--tasks names {twice[0]} twice: name it once")
    return tasks


def require_harness(flag: str) -> None:
    """Raises InputError if the package is missing. It is imported quietly, in some seconds."""
    if os.environ.get("HF_HUB_OFFLINE"):
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # read when datasets is imported
    # Otherwise standard errors are resampled in processes that inherit the handlers of signals.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_optional("lm_eval", flag)
        import_optional("lm_eval.evaluator", flag)
    for name in ("lm_eval", "datasets", "httpx", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import_optional("datasets", flag).disable_progress_bars()


def check_folders(folders: Sequence[str]) -> None:
    """Raises InputError for a folder that does not exist."""
    for folder in folders:
        if not Path(folder).is_dir():
            raise InputError(f"--include-path {folder}: there is no such folder")


def load_tasks(wanted: Wanted) -> Any:
    """The tasks with their data. Raises InputError if one is unknown, or cannot be read."""
    manager = _manager(wanted)
    for task in wanted.tasks:
        if task.name not in manager.all_tasks:
            raise InputError(_unknown(task.name, manager.all_tasks))
    loaded: dict[str, dict[str, Any]] = {}
    for task in wanted.tasks:
        try:
            found = manager.load([task.name])
        except Exception as error:
            raise InputError(
                f"--tasks {task.name} cannot be loaded ({class_and_line(error)}): without a "
                "network, name a folder with the task and its data by --include-path"
            ) from error
        for each in found["tasks"].values():
            if task.shots is not None:
                each.set_config(key="num_fewshot", value=task.shots)
        for kind, members in found.items():
            loaded.setdefault(kind, {}).update(members)
    return loaded


def _manager(wanted: Wanted) -> Any:
    """The harness' index of tasks. Its own, of thousands, is left out if it is not needed."""
    from lm_eval.tasks import TaskManager

    folders = list(wanted.folders)
    try:
        manager = TaskManager(include_path=folders or None, include_defaults=not folders)
        if all(task.name in manager.all_tasks for task in wanted.tasks):
            return manager
        return TaskManager(include_path=folders) if folders else manager
    except Exception as error:
        raise InputError(f"--include-path {' '.join(folders)}: {class_and_line(error)}") from error


def _unknown(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "`lm_eval ls tasks` lists the tasks"
    return f"--tasks {name} is unknown: {hint}"


def run_tasks(model: Any, loaded: Any, wanted: Wanted) -> dict[str, Any] | None:
    """The results of the harness, on rank 0. Collective. Raises InputError."""
    from lm_eval.evaluator import evaluate

    random.seed(0)  # as the harness' own command does: tasks shuffle with these generators
    numpy.random.seed(1234)
    tasks = loaded["tasks"]
    for name, each in tasks.items():
        documents = min(len(each.eval_docs), wanted.limit or len(each.eval_docs))
        if documents < model.world_size:
            raise InputError(
                f"--tasks {name}: {documents} of its documents are evaluated, and each of the "
                f"{model.world_size} ranks needs one: start at most {documents} "
                "(--nproc-per-node), or raise --limit"
            )
        if each.get_config("num_fewshot") is None:
            each.set_config(key="num_fewshot", value=0)
        each.set_fewshot_seed(seed=1234)
    with _bars_of_rank_0():
        try:
            found: dict[str, Any] | None = evaluate(
                lm=model,
                task_dict=loaded,
                limit=wanted.limit,
                bootstrap_iters=wanted.bootstrap,
                log_samples=False,
            )
        except (AssertionError, ValueError) as error:  # of generation_kwargs, for example
            raise InputError(
                f"--tasks: the harness refuses a task ({class_and_line(error)}): leave it out"
            ) from error
    return found


@contextmanager
def _bars_of_rank_0() -> Iterator[None]:
    """In this context, progress bars are shown on a terminal alone, by rank 0."""
    plain = tqdm.__init__
    hidden = int(os.environ.get("RANK", 0)) > 0 or not sys.stderr.isatty()

    def begin(bar: Any, *arguments: Any, **options: Any) -> None:
        plain(bar, *arguments, **options | ({"disable": True} if hidden else {}))

    tqdm.__init__ = begin
    try:
        yield
    finally:
        tqdm.__init__ = plain


def table_of(results: dict[str, Any]) -> str:
    """The metrics of each task."""
    from lm_eval.utils import make_table

    tables = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    return "\n".join(tables).rstrip()


def results_of(results: dict[str, Any]) -> dict[str, Any]:
    """The metrics, versions and shots of each task."""
    kept = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples")
    return {name: results[name] for name in kept if results.get(name)}


def class_and_line(error: BaseException) -> str:
    """The class and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
