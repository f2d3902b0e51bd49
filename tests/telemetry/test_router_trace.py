"""The folder of a trace: what NumPy reads, what a killed process leaves, and what is refused."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_parallel.data import atomic_files
from moe_parallel.errors import InputError
from moe_parallel.telemetry.router_trace import (
    REPLAY,
    TraceShape,
    TraceStep,
    TraceWriter,
    check_shape,
    read_trace,
)
from tests.telemetry.traces import contents

SHAPE = TraceShape(layers=(2, 4), num_experts=3, sequences=2, length=5, slots=2)
EXPERTS_LNSK = np.arange(40).reshape(2, 2, 5, 2) % 4 - 1


def step(iteration: int) -> TraceStep:
    return TraceStep(np.array([iteration, 4294967295]), EXPERTS_LNSK)


def write(folder: Path, *iterations: int, done: int = 0) -> Path:
    writer = TraceWriter(folder, SHAPE, done, goes_on=done > 0)
    for iteration in iterations:
        writer.append(iteration, step(iteration))
    return folder


def iterations(folder: Path) -> list[int]:
    found = list(read_trace(folder, REPLAY).iterations)
    assert set(contents(folder)) == {f"{iteration}.npz" for iteration in found}
    return found


def test_numpy_reads_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "sub" / "trace", *range(1, 12))
    assert iterations(folder) == list(range(1, 12))
    arrays = np.load(folder / "2.npz")
    assert arrays.files == ["version", "num_experts", "layers", "text", "experts"]
    assert arrays["version"] == 2 and arrays["num_experts"] == 3
    assert arrays["layers"].tolist() == [2, 4]
    assert arrays["text"].tolist() == [2, 4294967295]
    assert arrays["experts"].shape == (2, 2, 5, 2)
    # The 12th token of a step: slots 22 and 23, modulo 4, minus 1.
    assert arrays["experts"][1, 0, 1].tolist() == [1, 2]


def of_numpy(file: Path, **changes: Any) -> Path:
    """A step that another program has written with the means of NumPy; its folder."""
    fixed = {"version": 2, "num_experts": 3, "layers": [2, 4]}
    arrays = {"text": np.array([5, 6], np.uint32), "experts": EXPERTS_LNSK.astype(np.int16)}
    file.parent.mkdir(exist_ok=True)
    np.savez_compressed(file, **(fixed | arrays | changes))
    return file.parent


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    other = of_numpy(tmp_path / "other" / "5.npz", text=np.array([5, 4294967295], np.uint32))
    for folder in (write(tmp_path / "trace", 5, 6, done=4), other):
        trace = read_trace(folder, REPLAY)
        assert trace.shape == SHAPE
        read = trace.step(5)
        assert np.array_equal(read.text_N, step(5).text_N)
        assert np.array_equal(read.experts_LNSK, EXPERTS_LNSK)


@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_continued_run_repeats_what_it_trains_again(tmp_path: Path, done: int) -> None:
    folder = write(tmp_path / "trace", 1, 2, 3)
    assert iterations(write(folder, done=done)) == list(range(1, done + 1))
    write(folder, *range(done + 1, 5), done=done)
    assert contents(folder) == contents(write(tmp_path / "undisturbed", 1, 2, 3, 4))


def test_a_trace_of_which_nothing_would_remain_is_kept(tmp_path: Path) -> None:
    """It began after the checkpoint, or the run was killed before its first checkpoint."""
    folder = write(tmp_path / "trace", 3, 4, done=2)
    assert iterations(write(folder, 2, done=1)) == [2]
    assert iterations(tmp_path / "trace.previous") == [3, 4]
    assert iterations(write(folder, 1)) == [1]
    assert iterations(tmp_path / "trace.previous") == [2]


def test_what_a_killed_process_or_a_user_has_left_is_in_nobodys_way(tmp_path: Path) -> None:
    write(tmp_path / "trace", 1)
    (tmp_path / "trace" / "2.npz.writing-9").mkdir()
    (tmp_path / "trace.previous").symlink_to(write(tmp_path / "disk", 7))
    assert write(tmp_path / "trace", 1, 2).is_dir()
    assert iterations(tmp_path / "disk") == [7]


def test_a_full_disk_leaves_all_complete_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As does a process that is killed: a file gets its name when it is complete."""

    def fail(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = write(tmp_path / "trace", 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "flush_to_disk", fail)
        with pytest.raises(OSError, match="No space left"):
            write(folder, 3, done=2)
    assert iterations(folder) == [1, 2]
    assert iterations(write(folder, 3, done=2)) == [1, 2, 3]  # there is room again


def message(folder: Path, shape: TraceShape, done: int, *, goes_on: bool = True) -> str:
    with pytest.raises(InputError) as caught:
        TraceWriter(folder, shape, done, goes_on=goes_on)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(folder), "FOLDER")


@pytest.mark.parametrize("done", [0, 1])
def test_a_folder_with_other_files_is_not_touched(tmp_path: Path, done: int) -> None:
    """It may be that of --save."""
    folder = write(tmp_path / "run", 1, 2)
    (folder / "metrics.jsonl").touch()
    (folder / "config.yaml.writing-7").touch()
    before = contents(folder)
    assert message(folder, SHAPE, done) == (
        "--moe-router-trace FOLDER has other files, such as config.yaml.writing-7: name another "
        "folder"
    )
    assert contents(folder) == before


def test_another_runs_trace_is_not_touched(tmp_path: Path) -> None:
    folder = write(tmp_path / "trace", 1, 2)
    before = contents(folder)
    assert message(folder, SHAPE, 2, goes_on=False) == (
        "--moe-router-trace FOLDER exists, and a run that continues from another folder would "
        "overwrite it: name another folder"
    )
    assert message(folder, SHAPE, 4) == (
        "--moe-router-trace FOLDER ends at iteration 2, and the run continues after 4: name "
        "another folder"
    )
    other = TraceShape((2, 4), 3, 2, 5, slots=1)
    assert "2 slots for the experts of a token (--moe-router-topk), and" in message(
        folder, other, 2
    )
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (TraceShape((1, 2), 3, 2, 5, 2), "MoE layers 2 4 (--moe-layer-freq), and this run has 1 2"),
        (TraceShape((2, 4), 4, 2, 5, 2), "--num-experts 3, and this run has 4"),
        (TraceShape((2, 4), 3, 4, 5, 2), "--global-batch-size 2, and this run has 4"),
    ],
)
def test_a_run_of_other_sizes_is_refused(other: TraceShape, words: str) -> None:
    with pytest.raises(InputError) as caught:
        check_shape("FOLDER", REPLAY, SHAPE, other)
    assert str(caught.value).startswith(f"{REPLAY} FOLDER is of a run with {words}")


REMEDY = "name the folder that a run with --moe-router-trace has written"


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_trace(folder, REPLAY)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(folder), "FOLDER")


NOT_A_STEP = (
    "--moe-router-replay FOLDER/5.npz is damaged, or not a step of a trace of version 2: " + REMEDY
)


def npy() -> bytes:
    content = np.lib.format.magic(1, 0) + b"\x76\x00"
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1,), }"
    return content + header.ljust(117) + b"\n" + bytes(8)


CONTENTS = {
    "nothing": b"",
    "a header that is cut": b"\x93NUMPY\x01\x00",
    "an array": npy(),
    "an archive that is cut": b"PK\3\4\0\0",
    "an object": b"\x80\x04\x8c\x01a.",
}


@pytest.mark.parametrize("name", CONTENTS)
def test_another_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "5.npz").write_bytes(CONTENTS[name])
    assert refusal(tmp_path) == NOT_A_STEP


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 1},
        {"version": [2]},
        {"layers": 3},
        {"layers": np.array([{}], dtype=object)},
        {"layers": [1, 2, 3]},
        {"num_experts": [3, 4]},
        {"text": np.zeros(3, np.uint32)},
        {"experts": np.zeros(2, np.int16)},
        {"experts": EXPERTS_LNSK},  # int64
    ],
    ids=str,
)
def test_other_arrays_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert refusal(of_numpy(tmp_path / "5.npz", **changes)) == NOT_A_STEP
    np.savez(tmp_path / "5.npz", weights=np.arange(3))
    assert refusal(tmp_path) == NOT_A_STEP


def test_a_folder_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.npz").touch()
    assert refusal(tmp_path) == f"--moe-router-replay FOLDER has no step: {REMEDY}"
    missing = f"--moe-router-replay FOLDER: No such file or directory: {REMEDY}"
    assert refusal(tmp_path / "none") == missing
    assert refusal(tmp_path / "notes.npz") == missing.replace("No such file or", "Not a")
    folder = write(tmp_path / "trace", *range(5, 12), done=4)
    (folder / "6.npz").rename(folder / "06.npz")
    assert refusal(folder) == f"--moe-router-replay FOLDER lacks the step of iteration 6: {REMEDY}"
    (folder / f"{10**20}.npz").touch()
    assert refusal(folder) == f"--moe-router-replay FOLDER lacks the step of iteration 6: {REMEDY}"


def test_a_step_of_another_run_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "trace", 5, 6, done=4)
    of_numpy(folder / "6.npz", num_experts=4)
    with pytest.raises(InputError, match=r"6.npz is of a run with --num-experts 4, and this run"):
        read_trace(folder, REPLAY).step(6)


def test_a_damaged_step_is_refused(tmp_path: Path) -> None:
    """Wherever a bit is wrong, it is read right or refused in a line."""
    file = write(tmp_path, 5, done=4) / "5.npz"
    whole = file.read_bytes()
    for length in (len(whole) - 1, len(whole) - 400, len(whole) // 2, 100):
        file.write_bytes(whole[:length])
        assert refusal(tmp_path) == NOT_A_STEP
    for place in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        try:
            read = read_trace(tmp_path, REPLAY).step(5)
        except InputError as error:
            assert "\n" not in str(error)
        else:
            assert np.array_equal(read.experts_LNSK, EXPERTS_LNSK)
