"""Faults at moments of a run on two nodes: what the user sees, and the undisturbed run's bytes.

Every case ends with a complete run. `--write-table docs/reliability.md` writes there what was seen.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import pytest

from tests.cluster.job import EVERY_2, SlurmJob
from tests.cluster.slurm import Cluster
from tests.program import SMALL

pytestmark = pytest.mark.cluster

SECOND = "node2"  # rank 0 and the batch script are on node1


# --- moments: each is true when the run is there


def at_start(job: SlurmJob) -> bool:
    """The launchers have started ranks, which import torch and Megatron-Core."""
    return len(ranks_on(job.cluster, SECOND)) == 1


def in_a_step(job: SlurmJob) -> bool:
    return "iteration  5/12" in job.output


def in_a_save(job: SlurmJob) -> bool:
    return any(job.run.glob(".iter_*.writing"))


def in_an_evaluation(job: SlurmJob) -> bool:
    return "iteration  3/12" in job.output


def ranks_on(cluster: Cluster, node: str) -> list[int]:
    return [pid for pid in cluster.nodes.processes(node) if "RANK" in variables_of(pid)]


def launcher_on(cluster: Cluster, node: str) -> int:
    """The process that started the rank of a node."""
    (rank,) = ranks_on(cluster, node)
    return psutil.Process(rank).ppid()


def variables_of(pid: int) -> dict[str, str]:
    try:
        return psutil.Process(pid).environ()
    except psutil.Error:
        return {}


# --- faults: each returns when it has done its damage


def kill_the_node(job: SlurmJob) -> None:
    job.cluster.kill_node(SECOND)


def kill_a_rank(job: SlurmJob) -> None:
    for pid in ranks_on(job.cluster, SECOND):
        os.kill(pid, signal.SIGKILL)


def kill_a_launcher(job: SlurmJob) -> None:
    os.kill(launcher_on(job.cluster, SECOND), signal.SIGKILL)


def kill_slurmd(job: SlurmJob) -> None:
    os.kill(int((job.cluster.folder / f"slurmd.{SECOND}.pid").read_text()), signal.SIGKILL)


def cut_the_link(job: SlurmJob) -> None:
    job.cluster.nodes.set_link(SECOND, up=False)


def reach_the_time_limit(job: SlurmJob) -> None:
    job.cluster.run("scancel", "--signal=USR1", "--batch", str(job.id))


def preempt(job: SlurmJob) -> None:
    """SIGTERM to the ranks, as from a scheduler that takes the nodes for another job."""
    for node in job.cluster.nodes.names:
        for pid in ranks_on(job.cluster, node):
            os.kill(pid, signal.SIGTERM)


# --- repairs: what an administrator or time does


def nothing(job: SlurmJob) -> None:
    pass


def start_slurmd(job: SlurmJob) -> None:
    """The node comes back after Slurm has noticed that it was gone."""
    job.cluster.wait_until(
        lambda: job.cluster.state(job.id) != "RUNNING", 120, "Slurm has noticed the lost node"
    )
    job.cluster.start_node(SECOND)


def mend_the_link(job: SlurmJob) -> None:
    job.cluster.wait_until(
        lambda: job.cluster.state(job.id) != "RUNNING", 120, "Slurm has noticed the lost node"
    )
    job.cluster.nodes.set_link(SECOND, up=True)


@dataclass(frozen=True)
class Fault:
    do: Callable[[SlurmJob], None]
    repair: Callable[[SlurmJob], None]
    restarts: int | None  # of the job by Slurm; None: if Slurm notices in time
    seen: str  # a pattern in a line that the user sees

    @property
    def name(self) -> str:
        return self.do.__name__.replace("_", " ")


REQUEUED = "is requeued"
NODE_LOST = r"DUE TO NODE FAILURE|NODE_FAIL|nodes? .*(failed|not responding)|Node failure"
MOMENTS = (at_start, in_a_step, in_a_save, in_an_evaluation)
FAULTS = [
    (Fault(kill_the_node, start_slurmd, 1, NODE_LOST), MOMENTS),
    (Fault(kill_a_rank, nothing, 0, r"starting again: restart 1 of 3"), (in_a_step, in_a_save)),
    (Fault(kill_a_launcher, nothing, 1, REQUEUED), (in_a_step, in_a_save)),
    # The run goes on; Slurm ends it if it still runs after SlurmdTimeout.
    (Fault(kill_slurmd, start_slurmd, None, r"^iteration 12/12"), (in_a_step,)),
    (Fault(cut_the_link, mend_the_link, 1, NODE_LOST), (in_a_step, in_a_save)),
    (Fault(reach_the_time_limit, nothing, 1, REQUEUED), MOMENTS),
    (Fault(preempt, nothing, 1, REQUEUED), (in_a_step,)),
]
QUICK = [(kill_the_node, in_a_save), (reach_the_time_limit, in_a_step)]


@pytest.mark.parametrize(
    ("fault", "moment"),
    [
        pytest.param(
            fault,
            moment,
            id=f"{fault.do.__name__}-{moment.__name__}",
            marks=[] if (fault.do, moment) in QUICK else pytest.mark.full,
        )
        for fault, moments in FAULTS
        for moment in moments
    ],
)
def test_a_fault(cluster, tmp_path, undisturbed, table, fault, moment):
    job = SlurmJob(cluster, tmp_path, SMALL | undisturbed.data | EVERY_2)
    cluster.wait_until(lambda: moment(job), 120, moment.__name__)
    fault.do(job)
    began = time.monotonic()
    job.check_published()
    fault.repair(job)
    job.complete()
    seconds = time.monotonic() - began
    lines = [line for line in job.output.splitlines() if re.search(fault.seen, line)]
    assert lines, job.output
    assert "Traceback" not in job.output
    if fault.restarts is not None:
        assert job.restarts == fault.restarts
    job.check_published()
    job.check_whole(undisturbed)
    again = "Slurm" if job.restarts else "the launchers" if "restart 1" in job.output else "-"
    table.add(fault.name, moment.__name__.replace("_", " "), lines[0], again, seconds)
