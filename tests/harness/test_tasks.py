"""Tasks: found by name, in folders without a network; the presets of the papers, run to the end."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_parallel.errors import InputError
from moe_parallel.harness import tasks
from moe_parallel.harness.tasks import (
    PRESETS,
    PresetTask,
    Wanted,
    load_tasks,
    require_harness,
    run_tasks,
    wanted_tasks,
)

FOLDERS = (str(Path(__file__).parent / "tasks"),)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(os.environ, "HF_DATASETS_OFFLINE", "1")
    require_harness("--tasks")


def wanted(*names, folders=FOLDERS, shots=None):
    return Wanted(tuple(PresetTask(name, shots) for name in names), folders)


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


def test_a_task_whose_data_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "lost.yaml").write_text(
        "task: lost\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: nowhere.jsonl\n"
        "output_type: generate_until\ntest_split: test\ndoc_to_text: a\ndoc_to_target: b\n"
    )
    with pytest.raises(InputError) as raised:
        load_tasks(wanted("lost", folders=(str(tmp_path),)))
    message = str(raised.value)
    assert message.startswith("--tasks lost cannot be loaded (") and "\n" not in message


def test_a_rank_without_a_document_is_refused():
    """The harness would end in one rank while the others wait for it."""
    few = Wanted((PresetTask("count_choice", None),), FOLDERS, limit=1)
    with pytest.raises(InputError, match="count_choice: 1 of its documents .* start at most 1"):
        run_tasks(SimpleNamespace(world_size=2), load_tasks(few), few)
