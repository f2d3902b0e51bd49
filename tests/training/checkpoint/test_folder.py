"""The folder of checkpoints: publishing, replacing, and the remains of killed saves."""

import errno
import os
from pathlib import Path

import pytest

from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint.folder import CheckpointFolder, find_checkpoint
from moe_parallel.training.checkpoint.record import FORMAT
from moe_parallel.training.checkpoint.saving import last_good


def _publish(folder, iteration, content="", keep_last=None):
    writing = folder.begin(iteration)
    (writing / "weights").write_text(content)
    return folder.publish(iteration, {}, keep_last)


def test_a_later_run_replaces_a_checkpoint_of_the_same_iteration(tmp_path):
    folder = CheckpointFolder(tmp_path)
    _publish(folder, 1, "old")
    published = _publish(folder, 1, "new")
    assert (published / "weights").read_text() == "new"
    assert folder.latest() == published and folder.iterations() == [1]
    assert not list(tmp_path.glob(".*"))


def test_killed_between_the_two_renames_of_a_replacement(tmp_path):
    folder = CheckpointFolder(tmp_path)
    published = _publish(folder, 1, "old")
    folder.begin(1)
    published.rename(tmp_path / ".iter_0000001.old")
    assert (find_checkpoint(tmp_path) / "weights").read_text() == "old"
    folder.begin(2)
    assert folder.latest() == published
    assert (published / "weights").read_text() == "old"


def test_keeping_counts_the_newest_whatever_its_number(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for iteration in (10, 20, 5):  # 5: a run that restarted from an earlier checkpoint
        _publish(folder, iteration, keep_last=2)
    assert folder.iterations() == [5, 20]
    assert folder.latest().name == "iter_0000005"
    _publish(folder, 6, keep_last=1)
    assert folder.iterations() == [5, 6]  # the run may still diverge after 6
    folder.delete_oldest(6, 1)
    assert folder.iterations() == [6]


def test_keeping_prefers_what_led_to_the_newest(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for iteration in (10, 20, 15):  # nothing continued from 20; the run continued from 10
        _publish(folder, iteration, keep_last=2)
    assert folder.iterations() == [10, 15]


def test_the_last_good_checkpoint_is_whole_and_before_what_diverged(tmp_path):
    folder = CheckpointFolder(tmp_path)
    none = f"there is no good checkpoint in {tmp_path}"
    assert last_good(folder, 30) == none
    for iteration in (10, 20, 30):
        writing = folder.begin(iteration)
        (writing / "weights").write_text("")
        place = {"iteration": iteration, "consumed_samples": 0, "consumed_tokens": 0}
        files = {"weights": {"bytes": 0, "crc32": 0}}
        maps = {"layout": {}, "fingerprint": {}, "files": files}
        folder.publish(iteration, {"format": FORMAT, "training": place, **maps}, None)
    for diverged, good in ((31, 30), (30, 20), (21, 20), (20, 10)):
        assert last_good(folder, diverged).endswith(f" is {tmp_path}/iter_00000{good}")
    (tmp_path / "iter_0000020" / "weights").unlink()
    assert last_good(folder, 30).endswith("iter_0000010")
    assert last_good(folder, 10) == (
        f"{none}: iter_0000010 is finite, but no finite loss has followed it"
    )
    (tmp_path / "iter_0000010" / "weights").unlink()
    assert last_good(folder, 10) == none


def _folder(path):
    path.mkdir()
    (path / "held").write_text("mine")


def _link(path):
    _folder(path.parent.parent / "disk")
    path.symlink_to(path.parent.parent / "disk")


def _file(path):
    path.write_text("mine")


def _lost(path):
    path.symlink_to("x" * 300)  # an error of its own, like a link to a disk that is gone


def _mounted(path):
    _folder(path)
    (path / "disk").mkdir()


def _pipe(path):
    os.mkfifo(path)


FIRST, THIRD, WRITING = "iter_0000001", "iter_0000003", ".iter_0000003.writing"
IN_THE_WAY = [
    # where, what, and what is left besides the last two checkpoints
    (FIRST, _link, []),
    (FIRST, _lost, [FIRST]),
    (FIRST, _file, [FIRST]),
    (FIRST, _folder, [".iter_0000001.old"]),
    (FIRST, _mounted, [".iter_0000001.old"]),
    (THIRD, _lost, []),
    (THIRD, _pipe, [".iter_0000003.old"]),
    (THIRD, _folder, [".iter_0000003.old"]),
    (WRITING, _link, []),
    (WRITING, _pipe, [WRITING]),
    (WRITING, _folder, [WRITING]),
]


@pytest.mark.parametrize(("where", "put", "left"), IN_THE_WAY)
def test_nothing_in_the_way_stops_a_save(tmp_path, monkeypatch, where, put, left):
    """`held` cannot be deleted, as by chattr +i."""
    unlink = os.unlink

    def unlink_others(path, **options):
        if os.path.basename(path) == "held":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, **options)

    if put is _mounted:  # nothing there refuses to be deleted, and all of it stays
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "disk")
    else:
        monkeypatch.setattr(os, "unlink", unlink_others)
    run = tmp_path / "run"
    folder = CheckpointFolder(run)
    _publish(folder, 2)
    put(run / where)
    for _ in range(2):  # the second time, what is stuck has the plain names
        for iteration in (3, 4, 5):
            assert _publish(folder, iteration, str(iteration), keep_last=2).is_dir()
    found = {path.name for path in run.iterdir()} - {"latest_checkpointed_iteration.txt"}
    assert found == {"iter_0000004", "iter_0000005", *left}
    assert {path.name for path in folder.stuck} == set(left) - {FIRST}
    mine = [path for path in tmp_path.rglob("held") if path.is_file()]
    assert len(mine) == (put in (_link, _folder, _mounted))


def test_a_linked_folder_has_checkpoints(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    folder = CheckpointFolder(tmp_path / "run")
    for iteration in (1, 2, 3):
        _publish(folder, iteration, keep_last=2)
    assert CheckpointFolder(tmp_path / "disk").iterations() == [2, 3] and not folder.stuck


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    for name in ("metrics.jsonl", ".hidden", "iter_notes"):
        (tmp_path / name).write_text("mine")
    _publish(CheckpointFolder(tmp_path), 1, keep_last=1)
    for name in ("metrics.jsonl", ".hidden", "iter_notes"):
        assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"ten", "says 'ten' instead of an iteration; "),
        (b"\xff\xfe1", r"says '\\xff\\xfe1' instead of an iteration; "),
        ("²".encode(), "says '²' instead"),  # a digit for str.isdigit, but not a number for int
        (b"9" * 5000, "says '" + "9" * 40 + "' instead"),  # more digits than int() accepts
        (b"10", "says 10, but iter_0000010 is not there; name another checkpoint: iter_0000001"),
    ],
)
def test_a_tracker_that_names_no_checkpoint_is_one_line(tmp_path, content, said):
    folder = CheckpointFolder(tmp_path)
    _publish(folder, 1)
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(content)
    with pytest.raises(InputError) as caught:
        find_checkpoint(tmp_path)
    assert f"latest_checkpointed_iteration.txt {said}" in str(caught.value)
    assert "\n" not in str(caught.value)
    _publish(folder, 2)  # a running run writes a new one
    assert folder.latest().name == "iter_0000002"


def test_a_path_without_a_checkpoint_is_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    reasons = {"empty": "no checkpoint", "file": "this is a file", "absent": "there is no such"}
    for name, reason in reasons.items():
        with pytest.raises(InputError, match=f"^--load {tmp_path}/{name}: {reason}"):
            find_checkpoint(tmp_path / name)
