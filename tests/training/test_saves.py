"""Saves of a run, waiting for each or with --async-save: what goes wrong, and what is the same."""

import contextlib
import errno
import json
import os
import re
import signal
from unittest import mock

import pytest
import torch
from megatron.core.utils import unwrap_model
from torch import distributed as dist

from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint import saving
from moe_parallel.training.checkpoint.folder import CheckpointFolder
from moe_parallel.training.engine import Engine
from moe_parallel.training.failure import Diverged
from moe_parallel.training.signals import EXIT_INTERRUPTED
from tests.distributed import run_distributed
from tests.program import AOE, SMALL, pretrain_here, same_bytes, small_data, stored_tensors
from tests.tools.test_checkpoint import said
from tests.training.slow_writer import slow_writer
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


@contextlib.contextmanager
def _noting_records(save):
    """Whether all iterations are in metrics.jsonl when a checkpoint is about to get its name."""
    noted, publish = [], CheckpointFolder.publish

    def note(folder, iteration, *args):
        logged = {json.loads(line)["iteration"] for line in (save / "metrics.jsonl").open()}
        noted.append((iteration, set(range(1, iteration + 1)) <= logged))
        return publish(folder, iteration, *args)

    with mock.patch.object(CheckpointFolder, "publish", note):
        yield noted


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (ends, noted), _ = run_distributed(2, _runs, folder, small_data(folder), timeout=600)
    return folder, ends, noted


def test_a_run_that_saves_beside_training_is_the_same_to_the_bit(runs, capsys):
    folder, ends, noted = runs
    assert [code for code, _ in ends] == [0, 0, 0]
    assert records(folder / "beside") == records(folder / "waiting")
    for iteration in (2, 4, 6):
        name = f"iter_{iteration:07d}"
        lines = said(capsys, "diff", folder / "waiting" / name, folder / "beside" / name)
        assert "equal" in lines[-1], lines
    waited, resumed = (
        stored_tensors(folder / run / "iter_0000006") for run in ("waiting", "resumed")
    )
    assert same_bytes(waited, resumed)
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


def _in_step(number, action):
    """`action(engine)` is called on every rank in this step of a run, counted from 1."""
    step = Engine.step

    def disturbed(engine, batches):
        result = step(engine, batches)
        if engine.scheduler.num_steps == number:
            action(engine)
        return result

    return mock.patch.object(Engine, "step", disturbed)


def _terminate_rank_1(engine):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def _weights_times(factor):
    def multiply(engine):
        with torch.no_grad():
            for chunk in unwrap_model(engine.chunks):
                for parameter in chunk.parameters():
                    parameter.mul_(factor)

    return multiply


def _with_a_disk_full_on_rank_1(saves):
    """describe_files, with an error of the disk on rank 1 in these saves, counted from 1."""
    describe, done = saving.describe_files, []

    def describe_if_there_is_room(folder, names):
        done.append(None)
        if dist.get_rank() == 1 and len(done) in saves:
            raise OSError(errno.ENOSPC, FULL)
        return describe(folder, names)

    return mock.patch.object(saving, "describe_files", describe_if_there_is_room)


def _without_memory():
    return mock.patch.object(saving, "free_host_memory", lambda: 0)


#: options in addition to those of RUN, and the trouble
TROUBLES = {
    "well": ({"keep_last": 1}, lambda _: contextlib.nullcontext()),
    "full for a while": ({}, lambda _: _with_a_disk_full_on_rank_1((1, 2))),
    "full at the end": ({}, lambda _: _with_a_disk_full_on_rank_1((2, 3))),
    "diverges after a save": ({"keep_last": 1}, lambda _: _in_step(4, _weights_times(1e30))),
    "diverges before a save": ({}, lambda _: _in_step(4, _weights_times(float("inf")))),
}
WAITING = {
    "diverges at once": ({}, lambda _: _in_step(2, _weights_times(1e30))),
    "full when it leaves": ({"exit_interval": 4}, lambda _: _with_a_disk_full_on_rank_1((2,))),
}
WRITING = {
    "signal": ({}, lambda _: _in_step(3, _terminate_rank_1)),
    "no memory": ({}, lambda _: _without_memory()),
}


def _all(folder, options, troubles):
    """The end of each run in its own folder, and its output."""
    ends = {}
    for name in troubles:
        more, trouble = (TROUBLES | WAITING | WRITING)[name]
        save = folder / name.replace(" ", "_")
        with slow_writer(), trouble(save):
            try:
                ((code, printed),) = pretrain_here([RUN | options | {"save": save} | more])
                ends[name] = code, printed
            except (InputError, Diverged) as error:
                ends[name] = type(error).__name__, str(error)
    return ends


class Ends:
    """How the runs with troubles have ended."""

    def __init__(self, folder, options, troubles):
        self.folder = folder
        data = small_data(folder) | AOE
        ranks = run_distributed(2, _all, folder, data | options, troubles, timeout=600)
        self._ends, others = ranks
        assert {name: end[0] for name, end in self._ends.items()} == {
            name: end[0] for name, end in others.items()
        }

    def __call__(self, name):
        """(code or error, output or message, folder, iterations left) of a run."""
        save = self.folder / name.replace(" ", "_")
        left = sorted(path.name for path in save.glob("*iter_*"))
        return *self._ends[name], save, [int(each.removeprefix("iter_")) for each in left]


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    return Ends(tmp_path_factory.mktemp("waiting"), {}, [*TROUBLES, *WAITING])


@pytest.fixture(scope="module")
def writing(tmp_path_factory):
    return Ends(tmp_path_factory.mktemp("writing"), BESIDE, [*TROUBLES, *WRITING])


@pytest.fixture(params=["waiting", "writing"])
def ends(request):
    return request.getfixturevalue(request.param)


def test_a_finite_loss_lets_keep_last_delete(ends):
    code, _, _, left = ends("well")
    assert code == 0 and left == [6]


def test_a_write_that_fails_is_a_warning_and_training_goes_on(ends):
    code, printed, save, left = ends("full for a while")
    assert code == 0 and left == [6]
    warnings = [line for line in printed.splitlines() if line.startswith("warning: --save")]
    assert warnings == [
        f"warning: --save {save}: cannot write the checkpoint of iteration {iteration}: {FULL}; "
        "there was none before; free the disk or name another folder; training continues without it"
        for iteration in (2, 4)
    ]


def _check_last_save(end, iteration):
    kind, message, save, left = end
    assert kind == "NotSaved" and left == [2]
    assert message == (
        f"--save {save}: cannot write the checkpoint of iteration {iteration}: {FULL}; "
        "iter_0000002 is untouched; free the disk or name another folder"
    )


def test_a_last_save_that_fails_is_an_error(ends, waiting):
    _check_last_save(ends("full at the end"), 6)
    _check_last_save(waiting("full when it leaves"), 4)


def test_what_led_to_a_divergence_is_not_called_good(ends, waiting):
    kind, message, save, left = ends("diverges after a save")
    assert kind == "Diverged" and message.startswith("iteration 5: the loss is ")
    assert message.endswith(f"; the last good checkpoint is {save}/iter_0000002")
    assert left == [2, 4]  # in spite of --keep-last 1
    kind, message, save, _ = waiting("diverges at once")
    assert kind == "Diverged" and message.endswith(
        f"; there is no good checkpoint in {save}: iter_0000002 is finite, but no finite loss has "
        "followed it"
    )


def test_weights_that_are_not_finite_are_not_saved(ends):
    kind, message, save, left = ends("diverges before a save")
    assert kind == "Diverged" and "\n" not in message
    assert message.startswith("iteration 4: ") and "are not finite; nothing was saved; " in message
    assert message.endswith(f"the last good checkpoint is {save}/iter_0000002")
    assert left == [2]


@pytest.mark.full
def test_a_signal_while_a_checkpoint_is_written(writing):
    code, printed, _, left = writing("signal")
    assert code == EXIT_INTERRUPTED and left == [2, 3]
    last = [line for line in printed.splitlines() if line][-3:]
    assert last[0].endswith("iter_0000002") and last[1].endswith("iter_0000003")
    assert last[2].startswith("stopped by a signal after iteration 3;")


def test_without_memory_training_waits_for_each_checkpoint(writing):
    code, printed, _, left = writing("no memory")
    assert code == 0 and left == [2, 4, 6]
    (warning,) = [line for line in printed.splitlines() if "--async-save" in line]
    assert re.fullmatch(
        r"warning: --async-save: a copy of the state during training takes \d+\.\d GiB of host "
        r"memory, and 0.0 GiB are free; training waits for the checkpoint",
        warning,
    )
