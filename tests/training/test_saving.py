"""A run after a failed save, and the checkpoints that it keeps after it has diverged."""

import contextlib
import errno
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint import saving as writer
from moe_parallel.training.engine import Engine
from moe_parallel.training.failure import Diverged
from moe_parallel.training.run_lock import locked_folder
from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, small_data

FULL = os.strerror(errno.ENOSPC)


def _with_weights_times(factor, after):
    """Engine.step, which multiplies every weight at its end once the step `after` is done."""
    step, done = Engine.step, []

    def poisoned(engine, batches):
        result = step(engine, batches)
        done.append(None)
        if len(done) == after:
            with torch.no_grad():
                for chunk in unwrap_model(engine.chunks):
                    for parameter in chunk.parameters():
                        parameter.mul_(factor)
        return result

    return mock.patch.object(Engine, "step", poisoned)


@contextlib.contextmanager
def _with_obstacles(save):
    """Before the first step, links and what cannot be deleted come where a save tidies."""
    step, unlink = Engine.step, os.unlink

    def obstruct():
        for folder in ("iter_0000001", "../disk"):
            (save / folder).mkdir()
            (save / folder / "held\n").write_text("mine")
        os.mkfifo(save / ".iter_0000004.writing")
        (save / "iter_0000009").symlink_to("x" * 300)
        for link in ("iter_0000000", ".iter_0000006.writing"):
            (save / link).symlink_to("../disk")

    def obstructed(engine, batches):
        if engine.scheduler.num_steps == 0 and dist.get_rank() == 0:
            obstruct()
        return step(engine, batches)

    def unlink_others(path, **options):
        if os.path.basename(path) == "held\n":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        unlink(path, **options)

    with (
        mock.patch.object(Engine, "step", obstructed),
        mock.patch.object(os, "unlink", unlink_others),
    ):
        yield


def check_obstacles(save, end):
    """Whether a run among obstacles has saved all the same, and told of each obstacle once."""
    code, printed = end
    assert code == 0
    assert [line for line in printed.splitlines() if line.startswith("warning")] == [
        f"warning: {save}/.iter_0000004.writing cannot be deleted (Not a directory): "
        "delete it by hand",
        f"warning: {save}/.iter_0000001.old cannot be deleted (held\\n: Operation not permitted): "
        "delete it by hand",
    ]
    left = {path.name for path in save.glob("*iter_*")}
    assert left == {"iter_0000006", ".iter_0000004.writing", ".iter_0000001.old", "iter_0000009"}
    assert [path.name for path in (save.parent / "disk").iterdir()] == ["held\n"]


@contextlib.contextmanager
def _renamed_in_step_3(save):
    step = Engine.step

    def rename(engine, batches):
        if engine.scheduler.num_steps == 2:
            save.rename(save.with_name("elsewhere"))
        return step(engine, batches)

    with mock.patch.object(Engine, "step", rename):
        yield


def _with_a_full_disk(saves):
    """copy_files, with a full disk in these saves, counted from 1."""
    copy, done = writer.copy_files, []

    def copy_if_there_is_room(files, target):
        done.append(None)
        if len(done) in saves:
            raise OSError(errno.ENOSPC, FULL)
        copy(files, target)

    return mock.patch.object(writer, "copy_files", copy_if_there_is_room)


#: options in addition to saving every second iteration of 6, and the failure
RUNS = {
    "well": ({"keep_last": 1}, lambda save: _with_a_full_disk(())),
    "diverges after a save": ({"keep_last": 1}, lambda save: _with_weights_times(1e30, after=4)),
    "diverges before a save": ({}, lambda save: _with_weights_times(float("inf"), after=4)),
    "diverges at once": ({}, lambda save: _with_weights_times(1e30, after=2)),
    "obstacles": ({"keep_last": 1}, _with_obstacles),
    "renamed": ({}, _renamed_in_step_3),
    "full for a while": ({}, lambda save: _with_a_full_disk((1, 2))),
    "full at the end": ({}, lambda save: _with_a_full_disk((2, 3))),
    "full when it leaves": ({"exit_interval": 4}, lambda save: _with_a_full_disk((2,))),
    "beside another": ({}, lambda save: locked_folder(str(save))),
}


def _all(folder, data):
    """The end of each run, and its output."""
    ends = {}
    for name, (options, trouble) in RUNS.items():
        save = folder / name.replace(" ", "_")
        every = SMALL | data | {"save": save, "save_interval": 2, "train_iters": 6}
        with trouble(save):
            try:
                ((code, printed),) = pretrain_here([every | options])
                ends[name] = code, printed
            except (InputError, Diverged) as error:
                ends[name] = type(error).__name__, str(error)
    return ends


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (ends,) = run_distributed(1, _all, folder, small_data(folder), timeout=600)
    return folder, ends


def _saved(folder, name):
    """The iterations that a run has left, and everything else that a save may leave."""
    names = sorted(path.name for path in (folder / name.replace(" ", "_")).glob("*iter_*"))
    return [int(name.removeprefix("iter_")) for name in names]


@pytest.mark.full
def test_a_run_leaves_the_folder_of_another_alone(runs):
    folder, ends = runs
    kind, message = ends["beside another"]
    assert kind == "InputError"
    assert f"--save {folder}/beside_another: another run is writing there (process " in message
    assert not (folder / "beside_another").exists()  # the other run wrote nothing and ended


def test_a_finite_loss_lets_keep_last_delete(runs):
    folder, ends = runs
    assert ends["well"][0] == 0
    assert _saved(folder, "well") == [6]


def test_the_checkpoint_that_led_to_the_divergence_is_not_called_good(runs):
    folder, ends = runs
    kind, message = ends["diverges after a save"]
    assert kind == "Diverged"
    assert message.startswith("iteration 5: the loss is ")
    good = folder / "diverges_after_a_save" / "iter_0000002"
    assert message.endswith(f"; the last good checkpoint is {good}")
    assert _saved(folder, "diverges after a save") == [2, 4]  # in spite of --keep-last 1

    kind, message = ends["diverges at once"]
    assert kind == "Diverged"
    assert message.endswith(
        f"; there is no good checkpoint in {folder}/diverges_at_once: iter_0000002 is finite, but "
        "no finite loss has followed it"
    )


def test_weights_that_are_not_finite_are_not_saved(runs):
    folder, ends = runs
    kind, message = ends["diverges before a save"]
    assert kind == "Diverged" and "\n" not in message
    assert message.startswith("iteration 4: ") and "are not finite; nothing was saved; " in message
    good = folder / "diverges_before_a_save" / "iter_0000002"
    assert message.endswith(f"; the last good checkpoint is {good}")
    assert _saved(folder, "diverges before a save") == [2]


def test_what_cannot_be_deleted_stops_no_save(runs):
    folder, ends = runs
    check_obstacles(folder / "obstacles", ends["obstacles"])


def test_a_folder_that_was_renamed_is_told(runs):
    folder, ends = runs
    kind, message = ends["renamed"]
    assert kind == "NotSaved"
    assert message == (
        f"--save {folder}/renamed: cannot write the checkpoint of iteration 6: {folder}/renamed/"
        "tokenizer: No such file or directory; it, or the whole folder, was renamed or deleted "
        "during the run: put it back"
    )
    assert not (folder / "renamed").exists()
    assert _saved(folder, "elsewhere") == [2]


def test_training_goes_on_to_the_next_save(runs):
    folder, ends = runs
    code, printed = ends["full for a while"]
    assert code == 0
    warnings = [line for line in printed.splitlines() if line.startswith("warning")]
    for iteration, warning in zip((2, 4), warnings, strict=True):
        assert warning == (
            f"warning: --save {folder}/full_for_a_while: cannot write the checkpoint of iteration "
            f"{iteration}: {FULL}; there was none before; free the disk or name another folder; "
            "training continues without it"
        )
    assert _saved(folder, "full for a while") == [6]


@pytest.mark.parametrize(
    ("name", "iteration", "saved"), [("full at the end", 6, 2), ("full when it leaves", 4, 2)]
)
def test_a_last_save_that_fails_is_an_error(runs, name, iteration, saved):
    folder, ends = runs
    kind, message = ends[name]
    assert kind == "NotSaved"
    assert message == (
        f"--save {folder}/{name.replace(' ', '_')}: cannot write the checkpoint of iteration "
        f"{iteration}: {FULL}; iter_{saved:07d} is untouched; free the disk or name another folder"
    )
    assert _saved(folder, name) == [saved]
