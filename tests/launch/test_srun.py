"""Ranks that srun starts; the tests set Slurm's variables themselves."""

import os
import signal

import pytest

from tests.program import SCRIPT, SMALL, Program, flags, free_port, small_data


class Task(Program):
    """One of the two tasks of a step."""

    def __init__(self, folder, task, port, arguments, variables=None, script=SCRIPT):
        (folder / str(task)).mkdir()
        slurm = {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task),
            "SLURM_NTASKS": "2",
            "SLURM_JOB_NODELIST": "localhost",
            "MASTER_PORT": str(port),
        }
        variables = slurm | (variables or {})
        super().__init__(folder / str(task), 1, arguments, variables, script)

    def _start(self, script, world_size):
        return [str(script)]


def _step(folder, options):
    port = free_port()
    return [Task(folder, task, port, flags(options)) for task in range(2)]


@pytest.mark.full
def test_tasks_are_ranks_and_a_signal_ends_them_saved(tmp_path):
    save = tmp_path / "run"
    options = SMALL | small_data(tmp_path) | {"save": save, "train_iters": 100_000}
    first, second = _step(tmp_path, options)
    with first, second:
        first.wait_for("iteration      3")
        for task in (first, second):
            os.kill(task.pid, signal.SIGTERM)
        assert (first.finish(), second.finish()) == (75, 75)
        assert "on 2 ranks" in first.output
        assert second.output == ""
    iteration = int((save / "latest_checkpointed_iteration.txt").read_text())
    assert first.output.endswith(
        f"stopped by a signal after iteration {iteration}; continue with --load {save}\n"
    )


@pytest.mark.full
def test_an_error_of_the_task_that_leads_is_told_once(tmp_path):
    wrong = SMALL | small_data(tmp_path) | {"load": tmp_path / "none", "save": tmp_path / "run"}
    first, second = _step(tmp_path, wrong)
    with first, second:
        assert (first.finish(), second.finish()) == (2, 2)
        assert (first.output + second.output).count("error: ") == 1
        assert (first.output + second.output).count("\n") == 1
