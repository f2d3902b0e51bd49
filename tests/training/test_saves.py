"""Runs with --async-save: the same checkpoints and records as runs that wait for each save."""

import errno
import json
import os
import re
import signal
from unittest import mock

import pytest
from torch import distributed as dist

from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint import saving as checkpoint_writer
from moe_parallel.training.checkpoint import saving as snapshot
from moe_parallel.training.checkpoint.folder import CheckpointFolder
from moe_parallel.training.engine import Engine
from moe_parallel.training.failure import Diverged
from moe_parallel.training.signals import EXIT_INTERRUPTED
from tests.distributed import run_distributed
from tests.program import AOE, SMALL, pretrain_here, same_bytes, small_data, stored_tensors
from tests.tools.test_checkpoint import said
from tests.training.slow_writer import slow_writer
from tests.training.test_saving import _with_obstacles, _with_weights_times, check_obstacles
from tests.training.test_stopped_runs import records

FULL = os.strerror(errno.ENOSPC)
RUN = SMALL | {"train_iters": 6, "save_interval": 2, "eval_interval": 3, "log_interval": 1}
BESIDE = {"async_save": True}
WAITS = (
    "--async-save: the next checkpoint is due, and that of iteration 2 is still being written: "
    "training waits for it; a longer --save-interval avoids this"
)


def _runs(folder, data):
    """The same run three times: waiting, during training, and resumed from what that wrote."""
    run = RUN | data | {"expert_model_parallel_size": 2}
    beside = run | BESIDE
    ends = pretrain_here([run | {"save": folder / "waiting"}])
    with slow_writer(), _noting_records(folder / "beside") as noted:
        ends += pretrain_here([beside | {"save": folder / "beside"}])
    resumed = {"load": folder / "beside" / "iter_0000002", "save": folder / "resumed"}
    ends += pretrain_here([beside | resumed])
    return ends, noted


class _noting_records:
    """The last iteration in metrics.jsonl whenever a checkpoint is about to get its name."""

    def __init__(self, save):
        self.save, self.noted = save, []

    def __enter__(self):
        publish = CheckpointFolder.publish

        def note(folder, iteration, *args):
            last = (self.save / "metrics.jsonl").read_text().splitlines()
            logged = {json.loads(line)["iteration"] for line in last}
            self.noted.append((iteration, set(range(1, iteration + 1)) <= logged))
            return publish(folder, iteration, *args)

        self.patch = mock.patch.object(CheckpointFolder, "publish", note)
        self.patch.start()
        return self.noted

    def __exit__(self, *error):
        self.patch.stop()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (ends, noted), _ = run_distributed(2, _runs, folder, small_data(folder), timeout=600)
    return folder, ends, noted


def test_a_run_is_the_same_to_the_bit(runs, capsys):
    folder, ends, _ = runs
    assert [code for code, _ in ends] == [0, 0, 0]
    assert records(folder / "beside") == records(folder / "waiting")
    for iteration in (2, 4, 6):
        name = f"iter_{iteration:07d}"
        lines = said(capsys, "diff", folder / "waiting" / name, folder / "beside" / name)
        assert "equal" in lines[-1], lines


def test_a_checkpoint_written_beside_training_resumes_to_the_bit(runs):
    folder, _, _ = runs
    waited, resumed = (
        stored_tensors(folder / run / "iter_0000006") for run in ("waiting", "resumed")
    )
    assert same_bytes(waited, resumed)


def test_records_are_on_the_disk_before_the_checkpoint(runs):
    _, _, noted = runs
    assert noted == [(2, True), (4, True), (6, True)]


def test_the_next_save_waits_and_says_so_once(runs):
    folder, (_, (_, printed), _), _ = runs
    lines = [line for line in printed.splitlines() if line.startswith(("saved", "--async-save"))]
    saved = [f"saved {folder}/beside/iter_{iteration:07d}" for iteration in (2, 4, 6)]
    assert lines == [WAITS, *saved]


def _dense_first(folder, data):
    run = RUN | data | AOE | {"moe_dense_warmup_percent": 50, "save_interval": 1, "bf16": True}
    pretrain_here([run | {"save": folder / "waiting"}, run | BESIDE | {"save": folder / "beside"}])


@pytest.mark.full
def test_two_models_one_after_the_other(tmp_path):
    """The memory of the dense model's copy is not that of the experts' copy."""
    run_distributed(2, _dense_first, tmp_path, small_data(tmp_path), timeout=300)
    for iteration in range(1, 7):
        waited, beside = (
            stored_tensors(tmp_path / run / f"iter_{iteration:07d}")
            for run in ("waiting", "beside")
        )
        assert same_bytes(waited, beside)
    assert records(tmp_path / "beside") == records(tmp_path / "waiting")


def _with_a_signal_after(step_number):
    """Engine.step, during which SIGTERM comes to rank 1 in this step."""
    step, done = Engine.step, []

    def interrupted(engine, batches):
        done.append(None)
        if len(done) == step_number and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(engine, batches)

    return mock.patch.object(Engine, "step", interrupted)


def _with_a_disk_full_on_rank_1(saves):
    """describe_files, with an error of the disk on rank 1 in these saves, counted from 1."""
    describe, done = checkpoint_writer.describe_files, []

    def describe_if_there_is_room(folder, names):
        done.append(None)
        if dist.get_rank() == 1 and len(done) in saves:
            raise OSError(errno.ENOSPC, FULL)
        return describe(folder, names)

    return mock.patch.object(checkpoint_writer, "describe_files", describe_if_there_is_room)


def _without_memory():
    return mock.patch.object(snapshot, "free_host_memory", lambda: 0)


#: options in addition to those of RUN, and the trouble
TROUBLES = {
    "signal": ({}, lambda _: _with_a_signal_after(3)),
    "leaves": ({"exit_interval": 3}, lambda _: _with_a_signal_after(99)),
    "full for a while": ({}, lambda _: _with_a_disk_full_on_rank_1((1, 2))),
    "full at the end": ({}, lambda _: _with_a_disk_full_on_rank_1((2, 3))),
    "no memory": ({}, lambda _: _without_memory()),
    "well": ({"keep_last": 1}, lambda _: _with_a_signal_after(99)),
    "obstacles": ({"keep_last": 1}, _with_obstacles),
    "diverges after a save": ({"keep_last": 1}, lambda _: _with_weights_times(1e30, after=4)),
    "diverges before a save": ({}, lambda _: _with_weights_times(float("inf"), after=4)),
}


def _all(folder, data):
    """The end of each run in its own folder, and its output."""
    ends = {}
    for name, (options, trouble) in TROUBLES.items():
        save = folder / name.replace(" ", "_")
        with slow_writer(), trouble(save):
            try:
                ((code, printed),) = pretrain_here([RUN | data | BESIDE | {"save": save} | options])
                ends[name] = code, printed
            except (InputError, Diverged) as error:
                ends[name] = type(error).__name__, str(error)
    return ends


@pytest.fixture(scope="module")
def troubled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("troubled")
    data = small_data(folder) | AOE
    ends, others = run_distributed(2, _all, folder, data, timeout=600)
    assert {name: end[0] for name, end in ends.items()} == {
        name: end[0] for name, end in others.items()
    }
    return folder, ends


def _saved(folder, name):
    """The iterations that a run has left, and everything else that a save may leave."""
    names = sorted(path.name for path in (folder / name.replace(" ", "_")).glob("*iter_*"))
    return [int(name.removeprefix("iter_")) for name in names]


@pytest.mark.full
def test_a_signal_while_a_checkpoint_is_written(troubled):
    folder, ends = troubled
    code, printed = ends["signal"]
    assert code == EXIT_INTERRUPTED
    assert _saved(folder, "signal") == [2, 3]
    last = [line for line in printed.splitlines() if line][-3:]
    assert last[0].endswith("iter_0000002") and last[1].endswith("iter_0000003")
    assert last[2].startswith("stopped by a signal after iteration 3;")


def test_leaving_waits_for_what_is_being_written(troubled):
    folder, ends = troubled
    assert ends["leaves"][0] == 0
    assert _saved(folder, "leaves") == [2, 3]


def test_a_write_that_fails_is_a_warning_and_training_goes_on(troubled):
    folder, ends = troubled
    code, printed = ends["full for a while"]
    assert code == 0
    warnings = [line for line in printed.splitlines() if line.startswith("warning: --save")]
    for iteration, warning in zip((2, 4), warnings, strict=True):
        assert warning == (
            f"warning: --save {folder}/full_for_a_while: cannot write the checkpoint of iteration "
            f"{iteration}: {FULL}; there was none before; free the disk or name another folder; "
            "training continues without it"
        )
    assert _saved(folder, "full for a while") == [6]


def test_a_last_save_that_fails_is_an_error(troubled):
    folder, ends = troubled
    kind, message = ends["full at the end"]
    assert kind == "NotSaved"
    assert re.fullmatch(
        rf"--save {folder}/full_at_the_end: cannot write the checkpoint of iteration 6: {FULL}; "
        "iter_0000002 is untouched; free the disk or name another folder",
        message,
    )
    assert _saved(folder, "full at the end") == [2]


def test_without_memory_training_waits_for_each_checkpoint(troubled):
    folder, ends = troubled
    code, printed = ends["no memory"]
    assert code == 0 and _saved(folder, "no memory") == [2, 4, 6]
    (warning,) = [line for line in printed.splitlines() if "--async-save" in line]
    assert re.fullmatch(
        r"warning: --async-save: a copy of the state during training takes \d+\.\d GiB of host "
        r"memory, and 0.0 GiB are free; training waits for the checkpoint",
        warning,
    )


def test_keep_last_keeps_its_meaning(troubled):
    folder, ends = troubled
    assert ends["well"][0] == 0
    assert _saved(folder, "well") == [6]
    kind, message = ends["diverges after a save"]
    assert kind == "Diverged" and message.startswith("iteration 5: the loss is ")
    assert message.endswith(
        f"; the last good checkpoint is {folder}/diverges_after_a_save/iter_0000002"
    )
    assert _saved(folder, "diverges after a save") == [2, 4]  # in spite of --keep-last 1


def test_what_cannot_be_deleted_stops_no_save(troubled):
    folder, ends = troubled
    check_obstacles(folder / "obstacles", ends["obstacles"])


def test_weights_that_are_not_finite_are_not_saved(troubled):
    folder, ends = troubled
    kind, message = ends["diverges before a save"]
    assert kind == "Diverged" and "\n" not in message
    assert message.startswith("iteration 4: ") and "are not finite; nothing was saved; " in message
    assert message.endswith(
        f"the last good checkpoint is {folder}/diverges_before_a_save/iter_0000002"
    )
    assert _saved(folder, "diverges before a save") == [2]
