"""Scaling studies: the cells, their states, and the report of their records."""

import csv
import json
import os
from pathlib import Path

import pytest

from moe_parallel.analysis.scaling import (
    FAILED,
    FINISHED,
    NEW,
    QUEUED,
    cells,
    parse_vary,
    read_cells,
    rows_of,
    write_scaling_report,
)
from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import Cluster, Node
from moe_parallel.plan.search import plan_layout
from tests.program import SMALL

OPTIONS = SMALL | {"data_path": ["data"], "vocab_size": 64}
NODE = Node("cpu", 1, 1e9, None, 1e9, 1e12, 1e9, 1e9, 1e9, 1, "by hand")


def grid(nodes, vary=(), *, weak=False):
    return list(cells(Path(), OPTIONS, nodes, parse_vary(vary), ranks_per_node=2, weak=weak))


def test_every_number_of_nodes_has_every_combination():
    found = grid([1, 4], ["expert-model-parallel-size=1,2", "micro-batch-size=1,2"])
    assert len({each.name for each in found}) == 8
    assert [each.ranks for each in found] == [2] * 4 + [8] * 4
    assert found[1].options["micro_batch_size"] == 2
    assert found[2].options["expert_model_parallel_size"] == 2


def test_weak_scaling_multiplies_the_batch():
    for weak, batches in ((False, [8, 8]), (True, [8, 24])):
        found = grid([1, 3], weak=weak)
        assert [each.options["global_batch_size"] for each in found] == batches
    with pytest.raises(InputError, match="global-batch-size"):
        list(cells(Path(), {}, [1], {}, ranks_per_node=1, weak=True))


@pytest.mark.parametrize(
    "word", ["seed", "=1", "seed=1,,2", "load=a/b", "lr={a: b", "lr=!!int x", "lr=" + "[" * 3000]
)
def test_a_wrong_vary_is_named(word):
    with pytest.raises(InputError, match="--vary"):
        parse_vary([word])
    with pytest.raises(InputError, match="twice"):
        parse_vary(["seed=1", "seed=2"])


def test_a_cell_that_cannot_be_trained_says_why():
    first, second = grid([1], ["expert-model-parallel-size=2,8"])
    assert first.why_not() is None
    assert "expert-model-parallel-size" in (second.why_not() or "")
    (cell,) = grid([1], ["expert-model-parallel-sise=2"])  # wrong on any number of ranks
    with pytest.raises(InputError, match="expert-model-parallel-sise"):
        cell.why_not()


@pytest.fixture
def folders(tmp_path):
    """The folders of the cells of 1 and 2 nodes, without runs."""
    return written(tmp_path, [1, 2], {})


def written(study, nodes, varied):
    found = list(cells(study, OPTIONS, nodes, varied, ranks_per_node=1, weak=False))
    for each in found:
        each.write()
    return found


def finish(folder, step_seconds, save_seconds=0.0, processes=((1, 2, 3, 4),)):
    """Write records of 4 steps, of which the first is ten times as slow.

    Each step is followed by 0.25 s, of which the next record gives `save_seconds` to saves.
    `processes`: the iterations that each process of the run logged.
    """
    folder.run.mkdir()
    places = [(n, place) for of in processes for place, n in enumerate(of, start=1)]
    with (folder.run / "metrics.jsonl").open("w") as file:
        for iteration, place in places:
            seconds = step_seconds * (10 if iteration == 1 else 1)
            shares = {"own": 0.5, "data": 0.125, "dispatch": 0.2, "pipeline": 0.0, "reduce": 0.1}
            ranks = {
                f"{name}_seconds": [share * seconds] * folder.ranks
                for name, share in shares.items()
            }
            record = {
                "iteration": iteration,
                "lm_loss": 3.0,
                "tokens_per_second": 8 * 32 / seconds,
                "ranks": ranks,
                "elapsed_seconds": (step_seconds + 0.25) * place,
                "save_seconds": save_seconds,
            }
            file.write(json.dumps(record) + "\n")


def test_a_cell_is_new_then_queued_then_failed_or_finished(folders):
    first, second = folders
    assert first.state({"7"}) == NEW
    first.job_file.write_text("7" + " " * 100)
    first.output.write_text("begun\n")
    for file in (first.job_file, first.output):
        os.truncate(file, 1 << 40)  # sparse: only a part is read
    with first.output.open("a") as output:
        output.write("\nno space left\n\n")
    assert first.state({"7"}) == QUEUED
    assert first.state(set()) == FAILED
    assert first.last_line == "no space left"
    finish(second, 1.0)
    assert second.state(set()) == FINISHED


def test_the_report_leaves_out_the_warm_up(folders, tmp_path):
    with pytest.raises(InputError, match="no finished cell"):
        rows_of(folders, 1)
    finish(folders[0], 1.0, save_seconds=0.2)
    finish(folders[1], 0.8)
    rows, reasons = rows_of(read_cells(tmp_path), 1)
    assert reasons == {}
    write_scaling_report(rows, tmp_path)
    one, two = csv.DictReader((tmp_path / "scaling.csv").open())
    assert float(one["tokens_per_second"]) == pytest.approx(256)
    assert float(one["compute_seconds"]) == pytest.approx(0.375)
    assert float(one["data_seconds"]) == pytest.approx(0.125)
    assert float(one["rest_seconds"]) == pytest.approx(0.2)
    assert float(one["save_seconds"]) == pytest.approx(0.2)
    assert float(one["between_seconds"]) == pytest.approx(0.05)
    assert float(two["efficiency"]) == pytest.approx(1 / 0.8 / 2)
    assert two["plan_error"] == ""
    assert "Cells of " in (tmp_path / "scaling.html").read_text()
    with pytest.raises(InputError, match="--warm-up 4"):
        rows_of(folders, 4)


def test_the_plan_and_its_error_are_in_the_table(folders):
    for each in folders:
        finish(each, 1.0)
    rows, _ = rows_of(folders, 1, Cluster(NODE, 1))
    for row, each in zip(rows, folders, strict=True):
        plan = plan_layout(each.config, 64, Cluster(NODE, row["nodes"]))
        planned = plan.time.tokens_per_gpu * row["nodes"]
        assert row["planned_tokens_per_second"] == pytest.approx(planned, abs=0.01)
        assert row["plan_error"] == pytest.approx(planned / 256 - 1, abs=1e-4)
    other = Node("pair", 2, 1e9, None, 1e9, 1e12, 1e9, 1e9, 1e9, 1, "by hand")
    assert rows_of(folders, 1, Cluster(other, 1))[1] == {
        "nodes=1": "it has 1 rank on 1 node, and pair has 2",
        "nodes=2": "it has 2 ranks on 2 nodes, and pair has 2",
    }


def test_a_restarted_run_counts_each_step_once_and_no_time_between_processes(folders):
    finish(folders[0], 1.0)
    finish(folders[1], 1.0, processes=((1, 2, 3), (3, 4)))
    (one, two), _ = rows_of(folders, 1)
    for name in ("between_seconds", "step_seconds", "compute_seconds", "rest_seconds"):
        assert two[name] == pytest.approx(one[name])


def test_a_study_of_a_flag_has_the_flag_as_its_axis(tmp_path):
    for each in written(tmp_path, [2], {"num_experts": [8, 2], "seed": [1, 2]}):
        finish(each, each.varied["num_experts"] / each.varied["seed"])
    rows, _ = rows_of(read_cells(tmp_path), 1)
    assert [(row["axis"], row["num_experts"], row["seed"]) for row in rows] == [
        ("num_experts", 2, 1), ("num_experts", 2, 2), ("num_experts", 8, 1), ("num_experts", 8, 2)
    ]  # fmt: skip
    assert [row["efficiency"] for row in rows] == pytest.approx([1, 1, 0.25, 0.25])
