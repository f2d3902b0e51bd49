"""The shipped scripts on two nodes: complete, requeued, canceled, and wrong."""

import json
import sys

import pytest

from tests.cluster.job import SlurmJob
from tests.cluster.slurm import Cluster
from tests.program import EVERY_2, SMALL

pytestmark = pytest.mark.cluster


@pytest.fixture
def options(undisturbed):
    return SMALL | undisturbed.data | EVERY_2


def test_a_shipped_script_trains_on_two_nodes(cluster, tmp_path, options, undisturbed):
    job = SlurmJob(cluster, tmp_path, options)
    job.complete()
    assert job.restarts == 0
    job.check_whole(undisturbed)
    assert "on 2 ranks" in job.output


def test_four_ranks_on_two_nodes_split_the_experts(cluster, tmp_path, options):
    split = options | {"expert_model_parallel_size": 4}
    job = SlurmJob(cluster, tmp_path, split, ranks_per_node=2)
    job.complete()
    assert "on 4 ranks (tp 1 pp 1 dp 4 ep 4 etp 1)" in job.output


def test_a_canceled_job_saves_and_stays_canceled(cluster, tmp_path, options, undisturbed):
    job = SlurmJob(cluster, tmp_path, options)
    job.wait_for_output("iteration  3/12")
    cluster.run("scancel", str(job.id))
    job.wait_for_output("stopped by a signal after iteration")
    cluster.wait_until(lambda: cluster.state(job.id) == "CANCELLED", 60, "the job is canceled")
    cluster.wait_for_nodes()
    assert (cluster.state(job.id), job.restarts) == ("CANCELLED", 0)
    assert "requeued" not in job.output
    job.submit()
    job.complete()
    job.check_whole(undisturbed)


def test_a_wrong_flag_ends_the_job_with_its_code(cluster, tmp_path, options):
    job = SlurmJob(cluster, tmp_path, options | {"num_layers": 0})
    cluster.wait_for(job.id, "FAILED")
    assert job.exit_code == 2
    assert "--num-layers is 0" in job.output
    told = [line for line in job.output.splitlines() if line.startswith("error: ")]
    assert len(told) == 1
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


@pytest.mark.full
def test_an_array_of_jobs_trains_a_study(cluster, tmp_path, undisturbed):
    config = tmp_path / "study.yaml"
    options = SMALL | undisturbed.data | {"train_iters": 150, "vocab_size": 300}
    config.write_text(json.dumps({k.replace("_", "-"): _plain(v) for k, v in options.items()}))
    study = {"config": config, "selections": "topk,dense", "seeds": 1}
    job = SlurmJob(cluster, tmp_path, study, script="study.sbatch", slurm=["--array=0-1"])
    second = job.run / "cells" / "dense" / "seed-1234" / "metrics.jsonl"
    cluster.wait_until(second.exists, 240, "the second run trains")
    cluster.run("scancel", "--signal=USR1", "--batch", f"{job.id}_1")
    job.wait_for_output(f"job {job.id}_1 is requeued", 240)
    task = f"{job.id}_1"
    cluster.wait_until(lambda: cluster.state(task) == "PENDING", 60, "the task is in the queue")
    cluster.start_now(task, nodes=1)
    cluster.wait_until(job.ended, 400, "every task of the array has ended")
    assert job.output.count("DUE TO JOB REQUEUE") == 1  # not of the whole array
    cluster.nodes.run("node1", sys.executable, "tools/study/report_study.py", str(job.run))
    table = (job.run / "table.md").read_text()
    assert "topk" in table and "dense" in table


def test_a_checkpoint_is_evaluated_on_several_ranks(cluster, tmp_path, options, undisturbed):
    assert undisturbed.tensors
    job = SlurmJob(
        cluster,
        tmp_path,
        {"full_evaluation": True},
        script="evaluate.sbatch",
        run=undisturbed.folder / "run",
    )
    job.complete()
    assert "held-out text, every token:" in job.output
    assert "saved" not in job.output


def _plain(value):
    if isinstance(value, list):
        return [str(each) for each in value]
    return value if isinstance(value, (int, float, bool)) else str(value)


def test_sixteen_nodes_come_up_and_train(possible, tmp_path, undisturbed):
    (tmp_path / "cluster").mkdir()
    options = SMALL | undisturbed.data | {"train_iters": 3, "global_batch_size": 32}
    with Cluster(16, tmp_path / "cluster") as sixteen:
        job = SlurmJob(
            sixteen, tmp_path, options | {"eval_iters": 0, "expert_model_parallel_size": 4},
            slurm=["--nodes=16"],
        )  # fmt: skip
        job.complete(600)
    assert "on 16 ranks (tp 1 pp 1 dp 16 ep 4 etp 1)" in job.output
    assert "iteration 3/3" in job.output


@pytest.mark.full
def test_a_scaling_study_submits_a_job_for_each_number_of_nodes(cluster, tmp_path, undisturbed):
    config = tmp_path / "scaling.yaml"
    options = SMALL | undisturbed.data | {"vocab_size": 300, "tensorboard": False}
    config.write_text(json.dumps({k.replace("_", "-"): _plain(v) for k, v in options.items()}))
    study = tmp_path / "study"

    def scaling(*words):
        return cluster.run(sys.executable, "tools/study/scaling.py", *map(str, words))

    run = ("run", study, "--config", config, "--ranks-per-node", 1, "--nodes", 1, 2, 3)
    said = scaling(*run, "--sbatch=--dependency=singleton --gpus-per-node 0")
    assert said.count(": job ") == 2
    assert "nodes=3: not feasible: --global-batch-size is 8, not a multiple" in said
    cluster.wait_until(
        lambda: not cluster.run("squeue", "--noheader").strip(), 300, "both jobs have ended"
    )
    assert scaling(*run).count(": finished") == 2  # nothing is submitted again
    scaling("report", study, "--warm-up", 1)
    lines = (study / "scaling.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in lines[1:]] == [["1", "1"], ["2", "2"]]
