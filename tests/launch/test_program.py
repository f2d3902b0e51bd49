"""`python pretrain_gpt_moe.py`, started by a user, a shell or Slurm: one line, the right code."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from tests.program import SCRIPT, SMALL, Program, environment, flags, small_data


def _at_once(*arguments, **environment):
    """(exit code, stdout, stderr) of a start that ends before torch is imported."""
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", str(SCRIPT), *arguments],
        env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip
    lines = ended.stderr.splitlines()
    assert not [line for line in lines if line.split("|")[-1].strip() in ("torch", "numpy")]
    said = [line for line in lines if not line.startswith("import time:")]
    return ended.returncode, ended.stdout, said


@pytest.mark.parametrize("start", [(), ("--nproc-per-node", "2"), ("--max-restarts", "1")])
def test_a_wrong_flag_is_told_at_once(start):
    code, out, said = _at_once(*start, "--num-layer", "2")
    assert (code, out) == (2, "")
    assert said == ["error: --num-layer is not a flag of this program: did you mean --num-layers?"]


def test_wrong_values_are_told_at_once(tmp_path):
    code, _, said = _at_once("--nproc-per-node", "2", "--tensor-model-parallel-size", "3")
    assert code == 2
    assert len(said) == 1 and "--tensor-model-parallel-size" in said[0]
    code, _, said = _at_once("--nproc-per-node", "many")
    assert code == 2
    assert said[0].startswith("error: --nproc-per-node is many: ")
    code, _, said = _at_once("--nproc-per-node", "2", "--max-restarts", "1", "--save", "a")
    assert code == 2
    assert said == [
        "error: --max-restarts 1 continues from the newest checkpoint: name one folder by --save "
        "and by --load"
    ]


@pytest.mark.parametrize("start", [(), ("--nproc-per-node", "2")])
def test_a_configuration_from_a_pipe_is_refused_at_once(tmp_path, start):
    os.mkfifo(pipe := tmp_path / "pipe")  # as --config <(command) names one
    code, _, said = _at_once(*start, "--config", pipe)
    assert code == 2
    assert said == [f"error: --config {pipe} is a pipe, and each rank reads it: name a file"]


def test_help_lists_the_launcher_too():
    code, out, said = _at_once("--nproc-per-node", "2", "--help", "all")
    assert (code, said) == (0, [])
    assert "--num-layers" in out and "--nproc-per-node" in out and "--max-restarts" in out
    code, out, said = _at_once("--help")
    assert (code, said) == (0, []) and "--help router" in out
    assert _at_once("--help", SLURM_PROCID="1") == (0, "", [])


def test_a_launcher_inside_torchrun_is_refused():
    code, _, said = _at_once("--nproc-per-node", "2", RANK="0", TORCHELASTIC_RUN_ID="x")
    assert code == 2
    assert said[0].startswith("error: --nproc-per-node is for a start without torchrun")
    assert _at_once("--nproc-per-node", "2", RANK="1", TORCHELASTIC_RUN_ID="x")[2] == []


@pytest.mark.full
def test_bad_input_that_only_ranks_can_see(tmp_path):
    wrong = SMALL | small_data(tmp_path) | {"load": tmp_path / "none", "save": tmp_path / "run"}
    with Program(tmp_path, 2, flags(wrong)) as job:
        assert job.finish() == 2
    assert job.output == f"error: --load {tmp_path}/none: there is no such folder; check the path\n"


@pytest.mark.full
def test_a_batch_system_stops_the_launcher(tmp_path):
    """SIGTERM goes to the launcher only: the ranks save, and the batch system sees code 75."""
    save = tmp_path / "run"
    options = SMALL | small_data(tmp_path) | {"save": save, "train_iters": 100_000}
    with Program(tmp_path, 2, flags(options)) as job:
        job.wait_for("iteration      3")
        os.kill(job.pid, signal.SIGTERM)
        assert job.finish() == 75
        *_, saved, stopped = job.output.splitlines()
    start = json.loads((save / "starts.jsonl").read_text())
    assert (start["ranks"], start["load"]) == (2, None)
    assert " --nproc-per-node 2 --num-layers 2 " in start["command"]  # the launcher's, not a rank's
    iteration = int((save / "latest_checkpointed_iteration.txt").read_text())
    assert saved == f"saved {save}/iter_{iteration:07d}"
    assert (
        stopped == f"stopped by a signal after iteration {iteration}; continue with --load {save}"
    )


@pytest.mark.full
@pytest.mark.parametrize("launcher", [[], ["--nproc-per-node", "2"]], ids=["one", "two"])
def test_a_terminal_that_closes(tmp_path, launcher):
    """SIGHUP comes, and what is printed from then on is an error."""
    save = tmp_path / "run"
    options = SMALL | small_data(tmp_path) | {"save": save, "train_iters": 100_000}
    ours, theirs = pty.openpty()
    line = ["setsid", "--ctty", sys.executable, str(SCRIPT), *launcher, *flags(options)]
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    job = subprocess.Popen(
        line, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | environment()
    )
    signal.signal(signal.SIGHUP, hangup)
    os.close(theirs)
    log = save / "metrics.jsonl"
    while not (log.is_file() and log.read_text()):
        assert job.poll() is None
        time.sleep(0.05)
    os.close(ours)
    assert job.wait(600) == 75
    assert (save / "latest_checkpointed_iteration.txt").is_file()
