"""The states of a study's cells, and the report of its records."""

import csv
import json

import pytest

from moe_parallel.analysis.scaling.folder import FAILED, FINISHED, NEW, QUEUED, CellFolder
from moe_parallel.analysis.scaling.grid import cells
from moe_parallel.analysis.scaling.report import rows_of, write_report
from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import Cluster, Node
from moe_parallel.plan.search import plan_layout
from tests.program import SMALL

OPTIONS = SMALL | {"data_path": ["data"], "vocab_size": 64}


@pytest.fixture
def folders(tmp_path):
    """The folders of the cells of 1 and 2 nodes, without runs."""
    found = cells(OPTIONS, [1, 2], {}, ranks_per_node=1, weak=False)
    folders = [CellFolder.of(tmp_path, cell) for cell in found]
    for each in folders:
        each.write()
    return folders


def finish(folder, step_seconds):
    """Write records of 4 steps, of which the first is ten times as slow."""
    folder.run.mkdir()
    with (folder.run / "metrics.jsonl").open("w") as file:
        for iteration in range(1, 5):
            seconds = step_seconds * (10 if iteration == 1 else 1)
            shares = {"own": 0.5, "dispatch": 0.2, "pipeline": 0.0, "reduce": 0.1}
            ranks = {
                f"{name}_seconds": [share * seconds] * folder.cell.ranks
                for name, share in shares.items()
            }
            record = {
                "iteration": iteration,
                "tokens_per_second": 8 * 32 / seconds,
                "ranks": ranks,
                "elapsed_seconds": (step_seconds + 0.25) * iteration,
            }
            file.write(json.dumps(record) + "\n")


def test_a_cell_is_new_then_queued_then_failed_or_finished(folders):
    first, second = folders
    assert first.state({"7"}) == NEW
    first.job_file.write_text("7")
    first.output.write_text("begun\nno space left\n\n")
    assert first.state({"7"}) == QUEUED
    assert first.state(set()) == FAILED
    assert first.last_line == "no space left"
    finish(second, 1.0)
    assert second.state(set()) == FINISHED


def test_a_cell_is_not_replaced_by_another(folders, tmp_path):
    other = next(cells(OPTIONS | {"seed": 5}, [1], {}, ranks_per_node=1, weak=False))
    with pytest.raises(InputError, match="other options"):
        CellFolder.of(tmp_path, other).write()


def test_the_report_leaves_out_the_warm_up(folders, tmp_path):
    finish(folders[0], 1.0)
    finish(folders[1], 0.8)
    write_report(rows_of(CellFolder.read_all(tmp_path), 1, None), tmp_path)
    one, two = csv.DictReader((tmp_path / "scaling.csv").open())
    assert float(one["tokens_per_second"]) == pytest.approx(256)
    assert float(one["rest_seconds"]) == pytest.approx(0.2)
    assert float(one["between_seconds"]) == pytest.approx(0.25)
    assert float(two["efficiency"]) == pytest.approx(1 / 0.8 / 2)
    assert two["plan_error"] == ""
    assert (tmp_path / "scaling.png").stat().st_size > 1000


def test_the_plan_and_its_error_are_in_the_table(folders, tmp_path):
    node = Node("cpu", 1, 1e9, None, 1e9, 1e12, 1e9, 1e9, 1e9, 1, "by hand")
    for each in folders:
        finish(each, 1.0)
    rows = rows_of(folders, 1, node)
    for row in rows:
        plan = plan_layout(row.cell.config, 64, Cluster(node, row.cell.nodes))
        assert row.planned == plan.time.tokens_per_gpu * row.cell.nodes
    write_report(rows, tmp_path)
    for line in csv.DictReader((tmp_path / "scaling.csv").open()):
        planned = float(line["planned_tokens_per_second"])
        assert float(line["plan_error"]) == pytest.approx(planned / 256 - 1, abs=1e-4)


def test_no_record_after_the_warm_up_is_an_error(folders):
    finish(folders[0], 1.0)
    with pytest.raises(InputError, match="--warm-up 4"):
        rows_of(folders, 4, None)


def test_an_empty_study_is_an_error(folders):
    with pytest.raises(InputError, match="no finished cell"):
        rows_of(folders, 1, None)
