"""requeue.sh decides by exit code, signal and checkpoints; `scontrol` is replaced."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

REQUEUE = Path(__file__).parents[2] / "examples" / "slurm" / "requeue.sh"
JOB = """
set -uo pipefail
scontrol() { echo "scontrol $*"; return 1; }  # fails, so that the script does not wait for its end
. "$1"
shift
run_and_requeue "$@"
"""


# The signal comes while the script looks for checkpoints, before it starts the command.
EARLY = JOB.replace(
    "shift\n",
    """shift
newest_checkpoint() {
    [ -e "$1/sent" ] || { touch "$1/sent"; kill -USR1 $$; }
}
""",
)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "a run"
    folder.mkdir()
    return folder


def _start(folder, command, job=JOB, **variables):
    return subprocess.Popen(
        ["bash", "-c", job, "job", str(REQUEUE), str(folder), "bash", "-c", command],
        env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", **variables},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _end(process):
    try:
        printed, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, printed


def _saved(folder, name="."):
    return (
        f"mkdir -p '{folder}/{name}'; echo 5 > '{folder}/{name}/latest_checkpointed_iteration.txt'"
    )


@pytest.mark.parametrize("code", [1, 2, 3, 128])
def test_an_error_that_would_come_again_is_not_requeued(folder, code):
    assert _end(_start(folder, f"{_saved(folder)}; exit {code}")) == (code, "")


def test_a_complete_run_is_not_requeued(folder):
    assert _end(_start(folder, _saved(folder))) == (0, "")


def test_a_run_that_has_saved_is_requeued(folder):
    expected = "exit code 75: job 7 is requeued\nscontrol requeue 7\n"
    assert _end(_start(folder, "exit 75")) == (75, expected)


@pytest.mark.parametrize("code", [75, 76, 137])
@pytest.mark.parametrize("name", [".", "cells/topk/seed-1"])
def test_a_job_without_a_new_checkpoint_is_requeued_once(folder, code, name):
    requeued = (code, f"exit code {code}: job 7 is requeued\nscontrol requeue 7\n")
    ended = (
        code,
        f"not requeued: exit code {code}, and no new checkpoint in this start and in the one "
        "before it\n",
    )
    fails, saves = f"exit {code}", f"{_saved(folder, name)}; exit {code}"
    ends = [_end(_start(folder, command)) for command in (fails, saves, fails, fails, fails)]
    assert ends == [requeued, requeued, requeued, ended, requeued]


def test_the_requeues_of_another_job_do_not_count(folder):
    _end(_start(folder, "exit 76"))
    assert "is requeued" in _end(_start(folder, "exit 76", SLURM_JOB_ID="8"))[1]
    assert "not requeued" in _end(_start(folder, "exit 76"))[1]
    _end(_start(folder, "exit 0", SLURM_JOB_ID="8"))
    assert list(folder.iterdir()) == []


def test_a_task_of_an_array_requeues_itself_alone(folder):
    # The task that is started last has the number of the array.
    _, printed = _end(_start(folder, "exit 75", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3"))
    assert printed.endswith("scontrol requeue 7_3\n")


def test_a_lost_rank_is_started_again_in_the_job_first(folder):
    restarts = 'echo "restarts: $TORCHELASTIC_RESTART_COUNT"; '
    again = "restarts: 0\nstarting again: restart 1 of 2\nrestarts: 1\n"
    good = _start(
        folder, f"{restarts} [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 137", MAX_RESTARTS="2"
    )
    assert _end(good) == (0, again)
    bad = _start(folder, f"{restarts} exit 76", MAX_RESTARTS="2")
    requeued = "exit code 76: job 7 is requeued\nscontrol requeue 7\n"
    assert _end(bad) == (76, f"{again}starting again: restart 2 of 2\nrestarts: 2\n{requeued}")


def test_srun_that_finds_a_node_gone_when_it_starts_again_is_requeued(folder):
    lost = _start(
        folder, "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 76; exit 1", MAX_RESTARTS="3"
    )
    code, printed = _end(lost)
    assert code == 1
    assert printed.endswith("exit code 1: job 7 is requeued\nscontrol requeue 7\n")


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
@pytest.mark.parametrize("saving", ["", "sleep 0.5;"])
def test_a_signal_reaches_the_command_and_its_exit_code_the_job(folder, number, requeued, saving):
    ready = folder / "ready"
    command = f"trap '{saving} exit 75' USR1 TERM; touch '{ready}'; while :; do sleep 0.01; done"
    process = _start(folder, command)
    while not ready.exists():
        time.sleep(0.01)
    process.send_signal(number)
    code, printed = _end(process)
    assert code == 75
    assert ("scontrol requeue 7" in printed) == requeued


def test_a_signal_before_the_command_is_there_is_kept_for_it(folder):
    command = "trap 'exit 75' USR1; while :; do sleep 0.01; done"
    expected = "exit code 75: job 7 is requeued\nscontrol requeue 7\n"
    assert _end(_start(folder, command, job=EARLY)) == (75, expected)
