"""The description of a node that ranks measure together."""

import runpy
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import one_node
from tests.distributed import run_distributed
from tests.program import free_port
from tests.tools.running import ROOT, run_tool

TOOL = ROOT / "tools" / "study" / "measure_node.py"


def describe(ranks_per_node: int, seconds: float) -> dict[str, Any]:
    """The description by a clock on which every measured piece of work takes `seconds`."""
    tool = runpy.run_path(str(TOOL))
    readings = count()
    clock = SimpleNamespace(perf_counter=lambda: next(readings) * seconds)
    tool["describe"].__globals__["time"] = clock
    return tool["describe"](ranks_per_node, 1)


def test_figures_are_work_over_time() -> None:
    first, *others = run_distributed(4, describe, 2, 0.5)
    assert all(other == first for other in others)
    assert first["gpus"] == 2
    assert first["fp32"] == first["bf16"] == 2 * 512**3 / 0.5
    assert first["memory_rate"] == 2 * 32 * 2**20 / 0.5
    assert first["link_rate"] == first["network_rate"] == 2**20 / 2 / 0.5  # half goes to the other
    assert first["network_latency"] == 0.5
    assert first["call_time"] == 0.5 / 200


def test_one_node_has_no_network_but_its_links() -> None:
    found = run_distributed(2, describe, 2, 0.25)[0]
    assert found["network_rate"] == found["link_rate"] == 2**20 / 2 / 0.25


def _refused(ranks_per_node: int) -> str:
    try:
        describe(ranks_per_node, 1.0)
    except InputError as error:
        return str(error)
    return "described"


def test_ranks_that_fill_no_nodes_are_refused() -> None:
    assert "the job has 2 ranks" in run_distributed(2, _refused, 3)[0]


@pytest.mark.full
def test_a_process_without_a_job_says_how_to_start() -> None:
    result = run_tool("study/measure_node.py", "unused.json")
    assert result.returncode == 2
    assert "start it with srun or torchrun" in result.stderr


@pytest.mark.full
def test_the_report_plans_on_what_a_rank_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    file = tmp_path / "node.json"
    result = run_tool("study/measure_node.py", file, "--repeat", 1)
    assert (result.returncode, result.stdout) == (0, f"{file}\n"), result.stderr
    cluster = one_node(str(file))
    assert (cluster.node.name, cluster.node.gpus, cluster.ranks) == ("measured-x1", 1, 1)
    assert cluster.efficiency.linear == 1.0
