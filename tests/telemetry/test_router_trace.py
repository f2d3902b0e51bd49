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


def iterations(path: Path) -> list[int]:
    """As NumPy reads them, and as a replay does."""
    found: list[int] = np.load(path)["steps"]["iteration"].tolist()
    if found:
        assert read_trace(path, REPLAY).records["iteration"].tolist() == found
    return found


def test_numpy_reads_it(tmp_path: Path) -> None:
    trace = np.load(write(tmp_path / "sub" / "trace.npz", 1, 2))
    assert trace.files == ["version", "num_experts", "layers", "steps"]
    assert trace["version"] == 1 and trace["num_experts"] == 3
    assert trace["layers"].tolist() == [2, 4]
    steps = trace["steps"]
    assert steps["iteration"].tolist() == [1, 2]
    assert steps["text"][1].tolist() == [2, 4294967295]
    assert steps["experts"].shape == (2, 2, 2, 5, 2)
    # The 12th token of a record: slots 22 and 23, modulo 4, minus 1.
    assert steps["experts"][0, 1, 0, 1].tolist() == [1, 2]


def of_numpy(path: Path, **changes: Any) -> Path:
    """The records 5 and 6, written by another program with the means of NumPy."""
    records = np.concatenate([record(5), record(6)])
    np.savez(path, **(SHAPE.fixed | {"steps": records} | changes))
    return path


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.npz", 5, 6, done=4)
    assert is_trace(path) and not is_trace(__file__) and not is_trace(tmp_path / "none")
    for file in (path, of_numpy(tmp_path / "other.npz")):
        trace = read_trace(file, REPLAY)
        assert trace.shape == SHAPE
        assert isinstance(trace.records, np.memmap)
        for number, iteration in enumerate((5, 6)):
            for name in ("iteration", "text", "experts"):
                read = trace.records[number : number + 1][name]
                assert np.array_equal(read, record(iteration)[name])


def of_before(path: Path) -> Path:
    """The records 5 and 6 in the form of earlier versions."""
    kind = [("iteration", "<i8"), ("num_experts", "<i4"), ("layers", "<i2", (2,))]
    records = np.zeros(2, [*kind, ("text", "<u4", (2,)), ("experts", "<i2", (2, 2, 5, 2))])
    records["num_experts"], records["layers"] = 3, [2, 4]
    for number in range(2):
        for name in ("iteration", "text", "experts"):
            records[name][number] = record(5 + number)[name][0]
    with path.open("wb") as file:
        np.save(file, records)
    return path


def test_the_form_of_earlier_versions_is_read(tmp_path: Path) -> None:
    path = of_before(tmp_path / "trace.npy")
    assert is_trace(path)
    trace = read_trace(path, REPLAY)
    assert trace.shape == SHAPE
    assert trace.records["iteration"].tolist() == [5, 6]
    assert np.array_equal(trace.records["experts"][1], record(6)["experts"][0])


@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_continued_run_repeats_what_it_trains_again(tmp_path: Path, done: int) -> None:
    path = write(tmp_path / "trace.npz", 1, 2, 3)
    write(path, *range(done + 1, 5), done=done)
    assert path.read_bytes() == write(tmp_path / "undisturbed.npz", 1, 2, 3, 4).read_bytes()


def test_a_trace_may_begin_after_the_checkpoint(tmp_path: Path) -> None:
    """The run was recorded from iteration 3 on, and continues after iteration 1."""
    path = write(tmp_path / "trace.npz", 3, 4, done=2)
    assert iterations(write(path, 2, done=1)) == [2]
    assert iterations(tmp_path / "trace.previous.npz") == [3, 4]


def test_a_run_that_starts_anew_keeps_the_file_of_the_one_before(tmp_path: Path) -> None:
    """It may have been killed before its first checkpoint."""
    path = write(tmp_path / "trace.npz", 1, 2)
    assert iterations(write(path, 1)) == [1]
    assert iterations(tmp_path / "trace.previous.npz") == [1, 2]


def test_a_process_that_is_killed_at_once_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    path.touch()
    assert iterations(write(path, 5, done=4)) == [5]
    write(path, done=4)  # cuts it
    assert iterations(write(path, 5, done=4)) == [5]


def message(path: Path, shape: TraceShape, done: int, *, goes_on: bool = True) -> str:
    with pytest.raises(InputError) as caught:
        TraceWriter(path, shape, done, goes_on=goes_on)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), "FILE")


def test_another_runs_file_is_not_touched(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.npz", 1, 2)
    before = path.read_bytes()
    assert message(path, SHAPE, 2, goes_on=False) == (
        "--moe-router-trace FILE exists, and a run that continues from another folder would "
        "overwrite it: name another file"
    )
    assert message(path, SHAPE, 4) == (
        "--moe-router-trace FILE ends at iteration 2, and the run continues after 4: name another "
        "file"
    )
    other = TraceShape((2, 4), 3, 2, 5, slots=1)
    assert "2 slots for the experts of a token (--moe-router-topk), and" in message(path, other, 2)
    assert path.read_bytes() == before
    for file in (of_numpy(path), of_before(path)):
        assert message(file, SHAPE, 6) == (
            "--moe-router-trace FILE was not written by this version of the program, so a run "
            "cannot append to it: name another file"
        )


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
    "nothing": (b"", "it is cut, or not an .npz file"),
    "text": (b"iteration 1\n", "it is cut, or not an .npz file"),
    "a header that is cut": (b"\x93NUMPY\x01\x00", "it is cut, or has another array"),
    "an archive that is cut": (b"PK\3\4\0\0", "it is cut, or not an .npz file"),
    "an object": (b"\x80\x04\x8c\x01a.", "it is cut, or not an .npz file"),
}


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_trace(path, REPLAY)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), "FILE")


def not_a_trace(reason: str) -> str:
    return (
        f"--moe-router-replay FILE is not a trace of selections: {reason}; name the file that a "
        "run with --moe-router-trace has written"
    )


@pytest.mark.parametrize("name", CONTENTS)
def test_another_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "trace.npz"
    content, reason = CONTENTS[name]
    path.write_bytes(content)
    assert refusal(path) == not_a_trace(reason)


def renamed(old: str, new: str) -> Any:
    names = [new if name == old else name for name in record(5).dtype.names or ()]
    return np.concatenate([record(5), record(6)]).view(
        np.dtype([(name, SHAPE.dtype[number]) for number, name in enumerate(names)])
    )


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "another version": ({"version": 2}, "its version is 2, and this program reads version 1"),
    "layers as a number": ({"layers": 3}, "it has no version, num_experts and layers"),
    "layers as objects": (
        {"layers": np.array([{}], dtype=object)},
        "it has no version, num_experts and layers",
    ),
    "more layers": ({"layers": [1, 2, 3]}, "its field experts has wrong dimensions"),
    "an array of numbers": ({"steps": np.arange(3)}, "its array steps has no field experts"),
    "records in rows": (
        {"steps": record(1).reshape(1, 1)},
        "its array steps has wrong dimensions, or contains objects",
    ),
    "a field of another name": (
        {"steps": renamed("text", "words")},
        "its field text is missing or of another type",
    ),
    "a gap": (
        {"steps": np.concatenate([record(5), record(7)])},
        "its iterations are not successive",
    ),
    "no first step": ({"steps": record(0)}, "its iterations are not successive"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_arrays_are_refused(tmp_path: Path, name: str) -> None:
    changes, reason = OTHERS[name]
    assert refusal(of_numpy(tmp_path / "other.npz", **changes)) == not_a_trace(reason)


def test_files_of_other_programs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    np.savez(path, weights=np.arange(3))
    assert refusal(path) == not_a_trace("it has no array steps")
    np.savez_compressed(path, steps=record(5), **SHAPE.fixed)  # type: ignore[arg-type]
    assert refusal(path) == not_a_trace("it is compressed; numpy.savez does not compress")
    np.savez(path, steps=record(5))
    assert refusal(path) == not_a_trace("it has no version, num_experts and layers")
    for array in (np.arange(3), record(1)):
        with path.open("wb") as file:
            np.save(file, array)
        assert refusal(path) == not_a_trace("it has another array")
    assert refusal(tmp_path / "none.npz") == (
        "--moe-router-replay FILE: No such file or directory: name the file that a run with "
        "--moe-router-trace has written"
    )


def test_a_file_without_a_step_is_refused(tmp_path: Path) -> None:
    assert refusal(write(tmp_path / "trace.npz")).startswith(f"{REPLAY} FILE has no step yet: name")


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    """Wherever it is cut: within the directory, a record, or an array before the records."""
    path = write(tmp_path / "trace.npz", 1, 2)
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) - 400, len(whole) // 2, 100):
        path.write_bytes(whole[:length])
        assert refusal(path) == not_a_trace("it is cut, or not an .npz file")
