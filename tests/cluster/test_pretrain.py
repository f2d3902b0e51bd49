"""The shipped scripts on two nodes: complete, requeued, cancelled, and wrong."""

import json
import time

import pytest

from tests.cluster.job import EVERY_2, LAST, SlurmJob
from tests.program import SMALL

pytestmark = pytest.mark.cluster


@pytest.fixture
def options(undisturbed):
    return SMALL | undisturbed.data | EVERY_2


@pytest.mark.parametrize("script", ["pretrain.sbatch", "pretrain_srun.sbatch"])
def test_a_shipped_script_trains_on_two_nodes(cluster, tmp_path, options, undisturbed, script):
    job = SlurmJob(cluster, tmp_path, options, script=script)
    job.complete()
    assert job.restarts == 0
    job.check_whole(undisturbed)
    logs = [file for file in (job.run / "logs").rglob("*") if file.is_file()]
    assert any("on 2 ranks" in file.read_text() for file in logs)  # logs by rank


def test_four_ranks_on_two_nodes_split_the_experts(cluster, tmp_path, options):
    split = options | {"expert_model_parallel_size": 4}
    job = SlurmJob(cluster, tmp_path, split, script="pretrain_srun.sbatch", ranks_per_node=2)
    job.complete()
    assert "on 4 ranks (tp 1 pp 1 dp 4 ep 4 etp 1)" in (
        job.run / "logs" / f"{job.id}.rank0.out"
    ).read_text()


def test_the_time_limit_requeues_until_train_iters_are_done(
    cluster, tmp_path, options, undisturbed
):
    # What `--signal=B:USR1@300` does, without waiting for a real limit.
    job = SlurmJob(cluster, tmp_path, options)
    job.wait_for_output("iteration  3/12")
    cluster.run("scancel", "--signal=USR1", "--batch", str(job.id))
    job.complete()
    assert job.restarts == 1
    assert job.output.count(f"exit code 75: job {job.id} is requeued") == 1
    assert job.output.count("stopped by a signal after iteration") == 1
    job.check_whole(undisturbed)


def test_a_cancelled_job_saves_and_stays_cancelled(cluster, tmp_path, options, undisturbed):
    job = SlurmJob(cluster, tmp_path, options)
    job.wait_for_output("iteration  3/12")
    cluster.run("scancel", str(job.id))
    job.wait_for_output("stopped by a signal after iteration")
    cluster.wait_for_nodes()
    time.sleep(2)  # a requeue would show by now
    assert cluster.state(job.id) == "CANCELLED"
    assert "requeued" not in job.output
    job.submit()
    job.complete()
    job.check_whole(undisturbed)


def test_a_wrong_flag_ends_the_job_with_its_code(cluster, tmp_path, options):
    job = SlurmJob(cluster, tmp_path, options | {"num_layers": 0})
    cluster.wait_for(job.id, "FAILED")
    assert job.exit_code == 2
    assert "--num-layers is 0" in job.output
    assert job.output.count("error: ") == 1 or "srun: error" in job.output
    assert "requeued" not in job.output


def test_two_jobs_in_one_folder(cluster, tmp_path, options, undisturbed):
    first = SlurmJob(cluster, tmp_path, options | {"train_iters": 100_000}, slurm=["--nodes=1"])
    first.wait_for_output("iteration      3")
    other = tmp_path / "other"
    other.mkdir()
    (other / "run").symlink_to(first.run)
    second = SlurmJob(cluster, other, options, slurm=["--nodes=1"], when_idle=False)
    cluster.wait_for(second.id, "FAILED")
    assert second.exit_code == 2
    assert "node1" in second.output
    cluster.run("scancel", str(first.id))


def test_a_container_is_the_words_before_python(cluster, tmp_path, options, undisturbed):
    enter = tmp_path / "enter"
    enter.write_text('#!/bin/sh\necho "$1" >> "$0.seen"\nshift 2\nexec "$@"\n')
    enter.chmod(0o755)
    job = SlurmJob(cluster, tmp_path, options, variables={"RUN_IN": f"{enter} --image x"})
    job.complete()
    assert (tmp_path / "enter.seen").read_text() == "--image\n" * 2  # once on each node
    job.check_whole(undisturbed)
