"""Faults at moments of a run on two nodes: what the user sees, and the undisturbed run's bytes.

Every case ends with a complete run. `--write-table docs/reliability.md` writes there what was seen,
after each test. tests/cluster/fault_cases.py lists the cases.
"""

from __future__ import annotations

import re
import time

import pytest

from tests.cluster import disturbances as do
from tests.cluster.disturbances import disturbed
from tests.cluster.fault_cases import (
    LOST_NODE,
    NAN,
    NAN_WITHIN,
    NODE_LOST,
    POISONED,
    REAL_LIMIT,
    SAVE,
    cases,
)
from tests.cluster.job import SlurmJob
from tests.program import EVERY_2, SMALL

pytestmark = pytest.mark.cluster

QUICK = [
    ("kill the node", "in a save"),
    ("reach the time limit", "in a step"),
]


def started_again_by(job: SlurmJob) -> str:
    return "Slurm" if job.restarts else "the job" if "restart 1" in job.output else "-"


def line_with(job: SlurmJob, pattern: str) -> str:
    """The first line of the output in which the pattern is; no line has a traceback."""
    lines = [line for line in job.output.splitlines() if re.search(pattern, line)]
    assert lines, job.output
    assert "Traceback" not in job.output
    return lines[0]


@pytest.mark.parametrize(
    ("fault", "moment"),
    [
        pytest.param(
            fault,
            moment,
            id=f"{fault.name}-{moment}".replace(", ", "_").replace(" ", "_"),
            marks=[] if (fault.name, moment) in QUICK else pytest.mark.full,
        )
        for fault, moment in cases()
    ],
)
def test_a_fault(cluster, tmp_path, undisturbed, table, fault, moment):
    options = SMALL | undisturbed.data | EVERY_2 | fault.options
    variables = {**fault.variables, **disturbed(tmp_path, fault.disturbance(moment))}
    assert undisturbed.tensors
    job = SlurmJob(cluster, tmp_path, options, variables=variables)
    cluster.wait_until((tmp_path / "started").exists, 180, f"a rank is disturbed {moment}")
    in_a_save = moment == SAVE and fault.disturb is None
    if in_a_save:
        assert (job.run / ".iter_0000004.writing" / "__1_0.distcp").stat().st_size > 0
    began = time.monotonic()
    fault.do(job, fault.node)
    assert job.left_its_pause != "late"
    if in_a_save and not job.left_its_pause:
        assert not (job.run / "iter_0000004").exists()
    job.go_on()
    if not fault.damages:
        job.check_published()
    fault.repair(job, fault.node)
    job.complete(fault.within - (time.monotonic() - began))
    seconds = time.monotonic() - began
    line = line_with(job, fault.seen)
    if fault.restarts is not None:
        assert job.restarts == fault.restarts
    job.check_published()
    job.check_whole(undisturbed)
    table.add((fault.name, moment), line, started_again_by(job), seconds)


@pytest.mark.full
def test_a_node_is_lost_before_the_start(cluster, tmp_path, undisturbed, table):
    """The job comes when Slurm has not yet noticed that a node is gone."""
    within, node = 180, do.SECOND
    assert undisturbed.tensors
    cluster.wait_for_nodes()
    cluster.kill_node(node)
    began = time.monotonic()
    job = SlurmJob(cluster, tmp_path, SMALL | undisturbed.data | EVERY_2, when_idle=False)
    cluster.wait_until(lambda: node not in cluster.nodes_that_answer(), 120, "the loss is noticed")
    cluster.start_node(node)
    job.complete(within - (time.monotonic() - began))
    seconds = time.monotonic() - began
    line = line_with(job, NODE_LOST + "|^iteration 12/12")
    job.check_whole(undisturbed)
    table.add(LOST_NODE, line, started_again_by(job), seconds)


@pytest.mark.full
def test_slurm_itself_sends_the_signal_before_the_limit(cluster, tmp_path, undisturbed, table):
    """`--time=2 --signal=B:USR1@60`: Slurm sends SIGUSR1 after 30 to 60 seconds.

    Every 30 seconds, it signals the jobs that reach `--signal` within the next 30 seconds.
    """
    within = 240
    options = SMALL | undisturbed.data | EVERY_2 | {"train_iters": 12}
    variables = disturbed(tmp_path, "slower_steps 1")
    job = SlurmJob(
        cluster, tmp_path, options, variables=variables, slurm=["--time=2", "--signal=B:USR1@60"]
    )
    job.wait_for_output("is requeued", 150)
    began = time.monotonic()
    job.complete(within)
    seconds = time.monotonic() - began
    line = line_with(job, r"exit code 75: job \d+ is requeued")
    assert "stopped by a signal after iteration" in job.output
    assert job.restarts >= 1
    job.check_published()
    job.check_whole(undisturbed)
    table.add(REAL_LIMIT, line, started_again_by(job), seconds)


@pytest.mark.full
@pytest.mark.parametrize("moment", POISONED)
def test_a_weight_of_one_rank_becomes_nan(cluster, tmp_path, undisturbed, table, moment):
    """It would happen again without an end: Slurm leaves it to the user to start the job again."""
    variables = disturbed(tmp_path, f"nan_{moment.replace(' ', '_')} 1")
    job = SlurmJob(cluster, tmp_path, SMALL | undisturbed.data | EVERY_2, variables=variables)
    cluster.wait_for(job.id, "FAILED", NAN_WITHIN)
    began = time.monotonic()
    assert job.exit_code == 3
    (line,) = [line for line in job.output.splitlines() if line.startswith("error: ")]
    assert re.search(POISONED[moment], line)
    assert "Traceback" not in job.output and "requeued" not in job.output
    job.check_published()
    job.submit()
    job.complete(NAN_WITHIN)
    job.check_whole(undisturbed)
    seconds = time.monotonic() - began
    table.add((NAN, moment), line, "the user", seconds)
