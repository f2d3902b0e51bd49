"""What a test does to a running job on two nodes: moments, faults and repairs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.cluster.job import SlurmJob
from tests.cluster.slurm import URGENT, Cluster

DISTURBED = Path(__file__).parents[1] / "launch" / "disturbed.py"
FIRST, SECOND = "node1", "node2"  # rank 0 and the batch script are on the first


# --- moments: each is true when the run is there


def before_the_start(job: SlurmJob) -> bool:
    """The job is in the queue, and may be starting."""
    return True


def at_start(job: SlurmJob) -> bool:
    """The launchers have started ranks, which import torch and Megatron-Core."""
    return all(len(ranks_on(job.cluster, node)) == 1 for node in (FIRST, SECOND))


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


def kill_the_node(job: SlurmJob, node: str) -> None:
    job.cluster.kill_node(node)


def kill_a_rank(job: SlurmJob, node: str) -> None:
    for pid in ranks_on(job.cluster, node):
        os.kill(pid, signal.SIGKILL)


def kill_a_launcher(job: SlurmJob, node: str) -> None:
    os.kill(launcher_on(job.cluster, node), signal.SIGKILL)


def kill_slurmd(job: SlurmJob, node: str) -> None:
    os.kill(int((job.cluster.folder / f"slurmd.{node}.pid").read_text()), signal.SIGKILL)


def cut_the_link(job: SlurmJob, node: str) -> None:
    job.cluster.nodes.set_link(node, up=False)


def interrupt_the_link(job: SlurmJob, node: str) -> None:
    """For three seconds, as when a switch starts again."""
    job.cluster.nodes.set_link(node, up=False)
    time.sleep(3)
    job.cluster.nodes.set_link(node, up=True)


def reach_the_time_limit(job: SlurmJob, node: str) -> None:
    job.cluster.run("scancel", "--signal=USR1", "--batch", str(job.id))


def preempt(job: SlurmJob, node: str) -> None:
    """A job of a higher priority takes the nodes: Slurm sends SIGTERM, and SIGKILL after 30 s."""
    job.cluster.sbatch(
        f"--partition={URGENT}", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"
    )


def stop_a_rank(job: SlurmJob, node: str) -> None:
    """It hangs: it neither goes on nor ends."""
    for pid in ranks_on(job.cluster, node):
        os.kill(pid, signal.SIGSTOP)


def cut_a_shard(job: SlurmJob, node: str) -> None:
    """Of the newest checkpoint; then all ranks are killed, so that the run reads it."""
    _damage(job, lambda shard: os.truncate(shard, 100))


def remove_a_shard(job: SlurmJob, node: str) -> None:
    """Of the newest checkpoint; then all ranks are killed, so that the run reads it."""
    _damage(job, Path.unlink)


def _damage(job: SlurmJob, damage: Callable[[Path], None]) -> None:
    """Damage the shard of rank 0. The ranks stand still, so that no newer checkpoint appears."""
    ranks = [pid for node in (FIRST, SECOND) for pid in ranks_on(job.cluster, node)]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    newest = max(job.run.glob("iter_*"))
    damage(min(newest.glob("*.distcp")))
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)


def hang(job: SlurmJob, node: str) -> None:
    """The program has disturbed itself: one rank sleeps forever."""


def be_slow(job: SlurmJob, node: str) -> None:
    """The program has disturbed itself: one rank sleeps for 0.5 s in each micro-batch."""


# --- repairs: what an administrator or time does


def nothing(job: SlurmJob, node: str) -> None:
    pass


def start_slurmd(job: SlurmJob, node: str) -> None:
    """The node comes back after Slurm has noticed that it was gone."""
    _wait_for_loss(job, node)
    job.cluster.start_node(node)


def mend_the_link(job: SlurmJob, node: str) -> None:
    _wait_for_loss(job, node)
    job.cluster.nodes.set_link(node, up=True)


def _wait_for_loss(job: SlurmJob, node: str) -> None:
    job.cluster.wait_until(
        lambda: job.cluster.state(job.id) != "RUNNING", 120, "Slurm has noticed the lost node"
    )
