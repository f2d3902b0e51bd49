"""Saves that are killed or fail, and checkpoints that cannot be loaded."""

import errno
import json
import os
import re
import shutil
import signal
from math import inf, nan
from unittest import mock

import pytest
from torch import distributed as dist

from moe_parallel.collective_errors import StorageError
from moe_parallel.data.sealed import write_sealed
from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint import folder as checkpoint_folder
from moe_parallel.training.checkpoint import saving
from moe_parallel.training.checkpoint import tensors as checkpoint_tensors
from moe_parallel.training.checkpoint.checkpointer import TrainingState
from moe_parallel.training.checkpoint.folder import CheckpointFolder
from moe_parallel.training.checkpoint.record import check_complete, read_record
from moe_parallel.training.failure import Diverged
from moe_parallel.training.optimizer import optimizer_parts
from tests.distributed import RankError, run_distributed
from tests.training.tiny_run import AOE, Layout, TinyRun

EP2 = Layout(2, ep=2)


def _save_twice(path, before_second):
    """Save iterations 1 and 2; returns the InputError of the second save, if there is one."""
    run = TinyRun(EP2, path)
    run.steps(1)
    run.save()
    run.steps(1)
    before_second()
    return _error(run.save)


def _error(action):
    """The message of the InputError that `action` raises."""
    try:
        action()
    except InputError as error:
        return str(error)


def _load_then_save(path):
    run = TinyRun(EP2, path)
    state = run.load(path)
    run.steps(1)
    run.save()
    return state.iteration, run.checkpointer.latest().name


def _kill_rank_1_while_writing():
    if dist.get_rank() == 1:
        write = checkpoint_tensors._WatchedStream.write

        def write_some_and_die(stream, data):
            if stream.tell() > 2000:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(stream, data)

        checkpoint_tensors._WatchedStream.write = write_some_and_die


def test_kill_9_while_saving_leaves_the_previous_checkpoint(tmp_path):
    with pytest.raises(RankError, match=r"died: exit code -9|failed"):
        run_distributed(2, _save_twice, tmp_path, _kill_rank_1_while_writing)
    assert run_distributed(2, _load_then_save, tmp_path) == [(1, "iter_0000002")] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000001",
        "iter_0000002",
        "latest_checkpointed_iteration.txt",
    ]


def _write_nothing(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _save_on_a_full_disk(folder):
    """The error of a save at each place where a full disk may stop it, and the result."""
    run = TinyRun(EP2, folder)
    run.save()
    messages = []
    for module, name in (
        (CheckpointFolder, "begin"),
        (checkpoint_tensors, "write_common"),
        (checkpoint_tensors._WatchedStream, "_put"),
        (saving, "copy_files"),
        (checkpoint_folder, "write_sealed"),
        (checkpoint_folder, "flush_to_disk"),
    ):
        run.steps(1)
        with mock.patch.object(module, name, _write_nothing):
            messages.append(_error(run.save))
        if dist.get_rank() == 0:  # rank 0 deletes the incomplete files
            assert not list(folder.glob(".*"))
    run.steps(1)
    return messages, run.save().name


def test_a_disk_that_is_full_at_any_point_of_a_save(tmp_path):
    found = run_distributed(2, _save_on_a_full_disk, tmp_path)
    assert found[0] == found[1]
    messages, last = found[0]
    for number, message in enumerate(messages, 1):
        assert re.fullmatch(
            rf"--save {tmp_path}: cannot write the checkpoint of iteration {number}: "
            r"(\S+/__0_0.distcp: )?No space left on device; iter_0000000 is untouched; "
            "free the disk or name another folder",
            message,
        ), message
    assert last == "iter_0000007"


def _save_what_is_not_finite(folder):
    """The error of a save if a weight, a moment, or only rank 1's part is not finite."""
    run = TinyRun(EP2, folder)
    run.steps(1)
    run.save()
    run.steps(1)
    messages = []
    for rank, what, value in ((0, "weight", nan), (1, "moment", inf), (1, "weight", -inf)):
        parameter = next(parameter for name, parameter in run.parameters() if ".experts." in name)
        (part,) = (
            p for p in optimizer_parts(run.engine.optimizer) if parameter in p.optimizer.state
        )
        tensor = parameter if what == "weight" else part.optimizer.state[parameter]["exp_avg_sq"]
        before = tensor.detach().clone()
        if dist.get_rank() == rank:
            tensor.data.flatten()[-1] = value
        with pytest.raises(Diverged) as caught:
            run.save()
        messages.append(str(caught.value))
        tensor.data.copy_(before)
    return messages, run.save().name


def test_what_is_not_finite_is_not_saved(tmp_path):
    found = run_distributed(2, _save_what_is_not_finite, tmp_path)
    assert found[0] == found[1]
    messages, last = found[0]
    assert len(messages) == 3 and last == "iter_0000002"
    for message in messages:
        assert re.fullmatch(
            r"iteration 2: \S*\.experts\.\S+ of the state to be saved are not finite; nothing was "
            rf"saved; the last good checkpoint is {tmp_path}/iter_0000001",
            message,
        ), message


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    run_distributed(2, _save_twice, path, int)
    return path


def test_only_what_is_whole_is_published(saved):
    """As if ranks wrote to different folders."""
    checkpoint = saved / "iter_0000002"
    files = read_record(checkpoint)["files"]
    check_complete(checkpoint, files)
    for name in (".metadata", "common.pt", "__0_0.distcp", "__1_0.distcp"):
        rest = {other: facts for other, facts in files.items() if other != name}
        with pytest.raises(StorageError, match=f"^{name} is missing: every rank has to write"):
            check_complete(checkpoint, rest)
    cut = files | {"__1_0.distcp": {"bytes": 100, "crc32": 0}}
    with pytest.raises(StorageError, match=r"__1_0.distcp has 100 bytes instead of \d+"):
        check_complete(checkpoint, cut)


OTHER_MODELS = [
    ({"hidden_size": 64}, "hidden_size is 32 in the checkpoint and 64 here"),
    (AOE, "expert_selection is TopKSelection in the checkpoint and AoESelection here"),
    ({"lr": 0.5}, "--lr is 0.01 in the checkpoint and 0.5 here"),
    # The fingerprint of these runs does not include the following options; the tensors differ.
    ({"moe_layer_freq": "[0]+[0]+[1]*2"}, r"the model has \S+, which the checkpoint lacks"),
    ({"num_layers": 3, "moe_layer_freq": "[0]+[1]*2"}, r"has \S+, which the model lacks"),
    ({"num_experts": 8}, r"\S+ is \[4, .*\] in the checkpoint and \[8, .*\] here"),
]


def _load_into_each(path):
    messages = []
    for options, _ in OTHER_MODELS:
        run = TinyRun(EP2, path, options=options)
        messages.append(_error(lambda run=run: run.load(path)))
        run.close()
    return messages


def test_checkpoints_of_another_model(saved):
    found = run_distributed(2, _load_into_each, saved)
    assert found[0] == found[1]
    for (_, reason), message in zip(OTHER_MODELS, found[0], strict=True):
        assert message.startswith(f"--load {saved}/iter_0000002: "), message
        assert re.search(reason, message), message
        assert "\n" not in message and "config.yaml" in message


def test_a_checkpoint_may_be_older_than_an_option(saved, tmp_path):
    path = shutil.copytree(saved / "iter_0000002", tmp_path / "iter_0000002")
    record = json.loads((path / "checkpoint.json").read_text())
    del record["fingerprint"]["heads"], record["checksum"]
    write_sealed(path / "checkpoint.json", record)
    assert run_distributed(2, _load, path) == [None, None]


def _load(path):
    TinyRun(EP2, path).load(path)


def _save_weights_then_load(path):
    run = TinyRun(Layout(), path)
    engine, state = run.engine, TrainingState(1, 8, 128)
    run.checkpointer.save(state, engine.chunks, None, None)
    assert run.checkpointer.load(path, engine.chunks, None, None) == state
    return _error(lambda: run.load(path))


def test_weights_alone_cannot_be_trained_on(tmp_path):
    (message,) = run_distributed(1, _save_weights_then_load, tmp_path)
    assert message.startswith(f"--load {tmp_path}/iter_0000001: it has weights, but no state of")
