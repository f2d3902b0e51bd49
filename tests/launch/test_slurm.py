"""The variables that Slurm sets for a task become those that torchrun sets for a rank."""

import pytest

from moe_parallel.launch.program import first_host, is_task, port, rank_variables

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("gpu[3,5]", "gpu3"),
        ("rack[1-2]node[04-05]", "rack1node04"),
        ("a-b[1-2].cluster,x", "a-b1.cluster"),
    ],
)
def test_the_first_host(nodes, first):
    assert first_host({"SLURM_JOB_NODELIST": nodes}) == first
    assert first_host({"SLURM_JOB_NODELIST": "other", "SLURM_STEP_NODELIST": nodes}) == first


def test_a_task_is_a_rank():
    assert is_task(TASK)
    assert not is_task({})
    assert not is_task(TASK | {"SLURM_NTASKS": "1"})
    assert not is_task(TASK | {"SLURM_STEP_NUM_TASKS": "1"})  # srun -n 1 in a job of 8 tasks
    assert rank_variables(TASK) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(port(TASK)),
    }


def test_what_the_user_has_set_stays():
    variables = rank_variables(TASK | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "1234")


@pytest.mark.parametrize("gpus", ["1", "h100:1"])
def test_a_task_that_sees_one_gpu_takes_it(gpus):
    assert rank_variables(TASK | {"SLURM_GPUS_PER_TASK": gpus})["LOCAL_RANK"] == "0"
