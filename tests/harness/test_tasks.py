"""Tasks: found by name, in folders without a network; the presets of the papers, run to the end."""

import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from moe_parallel.errors import InputError
from moe_parallel.harness import tasks
from moe_parallel.harness.tasks import (
    PRESETS,
    PresetTask,
    Wanted,
    check_folders,
    class_and_line,
    load_tasks,
    require_harness,
    run_tasks,
    wanted_tasks,
)
from tests.harness import made_up_data

FOLDERS = (str(Path(__file__).parent / "tasks"),)
EXAMPLES = (str(Path(__file__).parents[2] / "examples" / "tasks"),)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(os.environ, "HF_DATASETS_OFFLINE", "1")
    require_harness("--tasks")


def wanted(*names, folders=FOLDERS, shots=None):
    return Wanted(tuple(PresetTask(name, shots) for name in names), folders)


def test_tasks_and_shots_of_a_command_line():
    assert wanted_tasks(["piqa", "boolq"], None, None) == [
        PresetTask("piqa", None),
        PresetTask("boolq", None),
    ]
    assert wanted_tasks(["piqa"], None, 0) == [PresetTask("piqa", 0)]
    of_paper = wanted_tasks(["boolq"], "aoe-paper", None)
    assert of_paper == [*PRESETS["aoe-paper"].tasks, PresetTask("boolq", None)]
    assert {task.shots for task in wanted_tasks([], "aoe-paper", 1)} == {1}


def test_the_presets_are_those_of_the_papers():
    shots = {
        name: {task.name: task.shots for task in preset.tasks} for name, preset in PRESETS.items()
    }
    # Section 4.1: "The first five tasks are evaluated zero-shot, while the remaining tasks are
    # tested three-shot".
    zero = dict.fromkeys(["arc_easy", "piqa", "social_iqa", "winogrande", "hellaswag"], 0)
    three = dict.fromkeys(["mnli", "mrpc", "qnli", "qqp", "sst2"], 3)
    assert shots["aoe-paper"] == zero | three
    assert set(shots["dynamic-paper"]) == {
        "piqa", "hellaswag", "arc_easy", "commonsense_qa", "bbh"
    }  # fmt: skip
    lory = shots["lory-paper"]
    assert lory["nq_open"] == lory["triviaqa"] == 5 and lory["sst2"] == lory["mrpc"] == 16
    assert [name for name, number in lory.items() if number == 0] == [
        "piqa", "social_iqa", "boolq", "hellaswag", "winogrande", "race", "arc_easy",
        "arc_challenge",
    ]  # fmt: skip


@pytest.mark.full  # the index of the harness is read, which takes many seconds
def test_the_harness_has_the_tasks_of_the_presets(monkeypatch):
    from lm_eval.tasks import TaskManager

    manager = TaskManager()  # once for all
    monkeypatch.setattr(tasks, "_manager", lambda wanted: manager)
    known = set(manager.all_tasks)
    for preset in PRESETS.values():
        assert {task.name for task in preset.tasks} <= known
    with pytest.raises(InputError, match="--tasks piqqa is unknown: did you mean piqa"):
        load_tasks(wanted("piqqa", folders=()))
    with pytest.raises(InputError) as raised:
        load_tasks(wanted("piqa", folders=()))
    message = str(raised.value)
    assert message.startswith("--tasks piqa cannot be loaded (") and "\n" not in message
    assert "without a network, name a folder" in message


def test_a_folder_of_tasks_needs_neither_a_network_nor_the_harness_own_tasks():
    loaded = load_tasks(wanted("count_choice", "count_text"))
    assert set(loaded["tasks"]) == {"count_choice", "count_text"}
    assert len(loaded["tasks"]["count_choice"].test_docs()) == 8


def test_shots_of_a_task():
    loaded = load_tasks(wanted("copy", "word_sums", folders=EXAMPLES, shots=2))
    copy = loaded["tasks"]["copy"]
    assert copy.get_config("num_fewshot") == 2
    assert len(copy.test_docs()) == 115 and len(loaded["tasks"]["word_sums"].test_docs()) == 50
    document = copy.test_docs()[0]
    assert copy.doc_to_text(document) == f"copy {document['words']} :"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a"], "no-paper", None), "--preset no-paper is unknown: choose from aoe-paper, dyn"),
        ((["a", "b", "a"], None, None), "--tasks names a twice"),
        ((["piqa"], "aoe-paper", 0), "--tasks names piqa twice"),
    ],
)
def test_wrong_names(arguments, message):
    with pytest.raises(InputError) as raised:
        wanted_tasks(*arguments)
    assert message in str(raised.value)


def test_a_folder_that_does_not_exist():
    check_folders(FOLDERS)
    with pytest.raises(InputError, match="--include-path nowhere: there is no such folder"):
        check_folders([*FOLDERS, "nowhere"])


def test_a_task_whose_data_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "lost.yaml").write_text(
        "task: lost\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: nowhere.jsonl\n"
        "output_type: generate_until\ntest_split: test\ndoc_to_text: a\ndoc_to_target: b\n"
    )
    with pytest.raises(InputError) as raised:
        load_tasks(wanted("lost", folders=(str(tmp_path),)))
    message = str(raised.value)
    assert message.startswith("--tasks lost cannot be loaded (") and "\n" not in message


def test_without_the_harness(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(InputError) as raised:
        require_harness("--tasks")
    assert "--tasks needs lm_eval, which is not installed: pip install" in str(raised.value)


def test_the_first_line_of_an_error():
    assert class_and_line(ValueError("one\ntwo")) == "ValueError: one"
    assert class_and_line(KeyError()) == "KeyError"


#: The worked examples of bbh are in its task files; each of them is such a line.
WORKED = re.compile(r"^Q: ", re.MULTILINE)
MARKER = re.compile(r"item\d+")


def recorder() -> Any:
    """A model of the harness that answers everything alike, and keeps the contexts."""
    from lm_eval.api.model import LM

    class Recorder(LM):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.contexts: dict[str, set[str]] = defaultdict(set)

        def _keep(self, requests: Any) -> None:
            for each in requests:
                self.contexts[each.task_name].add(each.args[0])

        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            self._keep(requests)
            return [(-float(len(each.args[1])), False) for each in requests]

        def generate_until(self, requests: Any) -> list[str]:
            self._keep(requests)
            return ["So the answer is yes."] * len(requests)

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            raise AssertionError("no preset asks for it")

    return Recorder()


@pytest.mark.full  # the index of the harness is read, which takes many seconds
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_from_end_to_end(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_harness("--preset")
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", made_up_data.load)
    wanted = Wanted(PRESETS[preset].tasks, limit=3, bootstrap=0)
    model = recorder()
    found = run_tasks(model, load_tasks(wanted), wanted)
    for task in PRESETS[preset].tasks:
        parts = found["group_subtasks"].get(task.name) or [task.name]
        assert len(parts) == (27 if task.name == "bbh" else 1)
        for part in parts:
            contexts = model.contexts[part]
            assert contexts, part
            if task.shots is None:
                assert {len(WORKED.findall(text)) for text in contexts} == {3 + 1}, part
            else:
                rows = {len(set(MARKER.findall(text))) for text in contexts}
                assert rows == {task.shots + 1}, part
            metrics = {name.split(",")[0] for name in found["results"][part]}
            assert metrics & {"acc", "exact_match"}, part
