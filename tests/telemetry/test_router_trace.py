"""The file of a trace: what NumPy reads, what a killed process leaves, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_parallel.errors import InputError
from moe_parallel.telemetry.router_trace import (
    REPLAY,
    TraceShape,
    TraceWriter,
    check_shape,
    is_trace,
    read_trace,
    shape_of,
)

SHAPE = TraceShape(layers=(2, 4), num_experts=3, sequences=2, length=5, slots=2)


def record(iteration: int) -> np.ndarray[Any, Any]:
    made = SHAPE.record(iteration)
    made["text"] = [iteration, 4294967295]
    made["experts"] = np.arange(40).reshape(1, 2, 2, 5, 2) % 4 - 1
    return made


def write(path: Path, *iterations: int, done: int = 0) -> Path:
    writer = TraceWriter(path, SHAPE, done, goes_on=done > 0)
    for iteration in iterations:
        writer.append(record(iteration))
    return path


def test_numpy_reads_it(tmp_path: Path) -> None:
    trace = np.load(write(tmp_path / "sub" / "trace.npy", 1, 2))
    assert trace["iteration"].tolist() == [1, 2]
    assert trace["num_experts"].tolist() == [3, 3]
    assert trace["layers"].tolist() == [[2, 4]] * 2
    assert trace["text"][1].tolist() == [2, 4294967295]
    assert trace["experts"].shape == (2, 2, 2, 5, 2)
    # The 12th token of a record: slots 22 and 23, modulo 4, minus 1.
    assert trace["experts"][0, 1, 0, 1].tolist() == [1, 2]


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.npy", 5, 6, done=4)
    trace = read_trace(path, REPLAY)
    assert is_trace(path) and not is_trace(__file__) and not is_trace(tmp_path / "none")
    assert shape_of(trace) == SHAPE
    assert trace.tobytes() == record(5).tobytes() + record(6).tobytes()


def test_a_killed_process_leaves_all_complete_records(tmp_path: Path) -> None:
    """Whatever it had written of the next one."""
    path = write(tmp_path / "trace.npy", 1, 2)
    whole = path.read_bytes()
    for part in (b"\0", record(3).tobytes()[:-1], record(3).tobytes()):
        path.write_bytes(whole + part)
        assert np.load(path)["iteration"].tolist() == [1, 2]
        assert read_trace(path, REPLAY)["iteration"].tolist() == [1, 2]
    write(path, 3, done=2)
    assert path.read_bytes() == write(tmp_path / "undisturbed.npy", 1, 2, 3).read_bytes()


@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_continued_run_repeats_what_it_trains_again(tmp_path: Path, done: int) -> None:
    path = write(tmp_path / "trace.npy", 1, 2, 3)
    write(path, *range(done + 1, 5), done=done)
    assert path.read_bytes() == write(tmp_path / "undisturbed.npy", 1, 2, 3, 4).read_bytes()


def test_a_trace_may_begin_after_the_checkpoint(tmp_path: Path) -> None:
    """The run was recorded from iteration 3 on, and continues after iteration 1."""
    path = write(tmp_path / "trace.npy", 3, 4, done=2)
    assert np.load(write(path, 2, done=1))["iteration"].tolist() == [2]
    assert np.load(tmp_path / "trace.previous.npy")["iteration"].tolist() == [3, 4]


def test_a_run_that_starts_anew_keeps_the_file_of_the_one_before(tmp_path: Path) -> None:
    """It may have been killed before its first checkpoint."""
    path = write(tmp_path / "trace.npy", 1, 2)
    assert np.load(write(path, 1))["iteration"].tolist() == [1]
    assert np.load(tmp_path / "trace.previous.npy")["iteration"].tolist() == [1, 2]


def test_a_process_that_is_killed_at_once_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.npy"
    path.touch()
    assert np.load(write(path, 5, done=4))["iteration"].tolist() == [5]
    write(path, done=4)  # cuts it
    assert np.load(write(path, 5, done=4))["iteration"].tolist() == [5]


def message(path: Path, shape: TraceShape, done: int, *, goes_on: bool = True) -> str:
    with pytest.raises(InputError) as caught:
        TraceWriter(path, shape, done, goes_on=goes_on)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), "FILE")


def test_another_runs_file_is_not_touched(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.npy", 1, 2)
    before = path.read_bytes()
    assert message(path, SHAPE, 2, goes_on=False) == (
        "--moe-router-trace FILE exists, and a run that goes on from another folder would "
        "overwrite it: name another file"
    )
    assert message(path, SHAPE, 4) == (
        "--moe-router-trace FILE ends at iteration 2, and the run goes on after 4: name another "
        "file"
    )
    other = TraceShape((2, 4), 3, 2, 5, slots=1)
    assert "2 slots for the experts of a token (--moe-router-topk), and" in message(path, other, 2)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (TraceShape((1, 2), 3, 2, 5, 2), "MoE layers 2 4 (--moe-layer-freq), and this run has 1 2"),
        (TraceShape((2,), 3, 2, 5, 2), "MoE layers 2 4 (--moe-layer-freq), and this run has 2:"),
        (TraceShape((2, 4), 4, 2, 5, 2), "--num-experts 3, and this run has 4"),
        (TraceShape((2, 4), 3, 4, 5, 2), "--global-batch-size 2, and this run has 4"),
        (TraceShape((2, 4), 3, 2, 6, 2), "--seq-length 5, and this run has 6"),
    ],
)
def test_a_run_of_other_sizes_is_refused(other: TraceShape, words: str) -> None:
    with pytest.raises(InputError) as caught:
        check_shape("FILE", REPLAY, SHAPE, other)
    assert str(caught.value).startswith(f"{REPLAY} FILE is of a run with {words}")


CONTENTS = {
    "nothing": b"",
    "text": b"iteration 1\n",
    "a header that is cut": b"\x93NUMPY\x01\x00",
    "an object": b"\x80\x04\x8c\x01a.",
}


@pytest.mark.parametrize("name", CONTENTS)
def test_another_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "trace.npy"
    path.write_bytes(CONTENTS[name])
    with pytest.raises(InputError, match="is not a trace of selections: name the file"):
        read_trace(path, REPLAY)


def test_another_array_is_refused(tmp_path: Path) -> None:
    for array in (np.arange(3), record(1)[0:0], record(1).reshape(1, 1)):
        np.save(tmp_path / "other.npy", array)
        with pytest.raises(InputError, match=r"other.npy (is not a trace|has no step yet)"):
            read_trace(tmp_path / "other.npy", REPLAY)
    with pytest.raises(InputError, match=r"none.npy: No such file or directory: name the file"):
        read_trace(tmp_path / "none.npy", REPLAY)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.npy", 1, 2)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="is not a trace of selections"):
        read_trace(path, REPLAY)
