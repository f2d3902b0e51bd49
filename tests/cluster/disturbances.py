"""What a test does to a running job on two nodes: faults and repairs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.cluster.job import SlurmJob
from tests.cluster.slurm import URGENT, Cluster

DISTURBED = Path(__file__).parents[1] / "launch" / "disturbed.py"
FIRST, SECOND = "node1", "node2"  # rank 0 and the batch script are on the first


def disturbed(folder: Path, disturb: str) -> dict[str, str]:
    """The variable with which the job's program disturbs itself."""
    enter = folder / "enter"
    enter.write_text(
        f"#!/bin/sh\ncd {folder}\nexport DISTURB='{disturb}'\n"
        f"export PYTHONPATH={DISTURBED.parents[2]}${{PYTHONPATH:+:$PYTHONPATH}}\n"
        f'python=$1\nshift 2\nexec "$python" {DISTURBED} "$@"\n'
    )
    enter.chmod(0o755)
    return {"RUN_IN": str(enter)}


def ranks_on(cluster: Cluster, node: str) -> list[int]:
    return [pid for pid in cluster.nodes.processes(node) if _is_rank(pid)]


def _is_rank(pid: int) -> bool:
    """Whether srun has started it as a task of a step."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return "SLURM_STEP_ID" in process.environ() and DISTURBED.name in " ".join(
            process.cmdline()
        )
    return False


# --- faults: each returns when it has done its damage


def kill_the_node(job: SlurmJob, node: str) -> None:
    job.cluster.kill_node(node)


def kill_a_rank(job: SlurmJob, node: str) -> None:
    ranks = ranks_on(job.cluster, node)
    assert ranks
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)


def kill_slurmd(job: SlurmJob, node: str) -> None:
    os.kill(int((job.cluster.folder / f"slurmd.{node}.pid").read_text()), signal.SIGKILL)


def lose_slurmd(job: SlurmJob, node: str) -> None:
    """It is gone, in the middle of a long step, until Slurm ends the job."""
    kill_slurmd(job, node)
    _wait_for_loss(job, node)


def cut_the_link(job: SlurmJob, node: str) -> None:
    job.cluster.nodes.set_link(node, up=False)


def interrupt_the_link(job: SlurmJob, node: str) -> None:
    """For three seconds, as when a switch starts again. A rank that pauses goes on without it."""
    job.cluster.nodes.set_link(node, up=False)
    job.go_on()
    time.sleep(3)
    job.cluster.nodes.set_link(node, up=True)


def reach_the_time_limit(job: SlurmJob, node: str) -> None:
    job.cluster.run("scancel", "--signal=USR1", "--batch", str(job.id))
    _wait_for_the_signal(job)


def preempt(job: SlurmJob, node: str) -> None:
    """A job of a higher priority takes the nodes: Slurm sends SIGTERM, and SIGKILL after 30 s."""
    job.cluster.sbatch(
        f"--partition={URGENT}", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"
    )
    _wait_for_the_signal(job)


def _wait_for_the_signal(job: SlurmJob) -> None:
    """The rank that pauses is asked to stop."""
    job.cluster.wait_until(lambda: job.left_its_pause, 100, "the rank is asked to stop")


def stop_a_rank(job: SlurmJob, node: str) -> None:
    """It hangs: it neither goes on nor ends. Its heartbeat has told where it is."""
    time.sleep(1)
    ranks = ranks_on(job.cluster, node)
    assert ranks
    for pid in ranks:
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


def sleep(job: SlurmJob, node: str) -> None:
    """The program has disturbed itself: one rank sleeps forever."""


def be_slow(job: SlurmJob, node: str) -> None:
    """The program has disturbed itself: one rank sleeps for 0.2 s in each micro-batch."""


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
