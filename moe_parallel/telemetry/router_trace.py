"""The file of --moe-router-trace: which experts each token took, in every step of a run.

It is a NumPy array with a record for each iteration, in NumPy's own format (.npy):

    trace = numpy.load("trace.npy", mmap_mode="r")
    trace["experts"][6, 0, 2, 100]     # record 6, first MoE layer, sequence 2, position 100

iteration     int64, from 1; records are of successive iterations
num_experts   int32, E; with free experts, which have the last numbers, E + Z
layers        int16 [L], the numbers of the MoE layers in the model, from 1
text          uint32 [N], the CRC-32 of the tokens (int64, little-endian) of each sequence
experts       int16 [L, N, S, K], what each token chose: best choice first, -1 in an empty slot

Shape suffixes: L MoE layers, N sequences of a global batch, S tokens of a sequence, K slots per
token. The sequences are in the order in which data are read, micro-batch after micro-batch. Choices
that a capacity drops are included.

The header counts the complete records and is written after each of them. So a process that is
killed leaves a file with all complete steps, and bytes behind them that no reader looks at.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from moe_parallel.errors import InputError

TRACE, REPLAY = "--moe-router-trace", "--moe-router-replay"
_MAGIC = np.lib.format.MAGIC_PREFIX

_REMEDY = f"name the file that a run with {TRACE} has written"
_HEADER_LIMIT = 65536  # bytes; more than any trace has


@dataclass(frozen=True)
class TraceShape:
    """The sizes of the model and the batches of a trace."""

    layers: tuple[int, ...]  # the numbers of the MoE layers, from 1
    num_experts: int  # E
    sequences: int  # N
    length: int  # S
    slots: int  # K

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of a record."""
        layers = len(self.layers)
        return np.dtype(
            [
                ("iteration", "<i8"),
                ("num_experts", "<i4"),
                ("layers", "<i2", (layers,)),
                ("text", "<u4", (self.sequences,)),
                ("experts", "<i2", (layers, self.sequences, self.length, self.slots)),
            ]
        )

    def record(self, iteration: int) -> np.ndarray[Any, Any]:
        """A record without text and experts: an array of one element."""
        record = np.zeros(1, self.dtype)
        record["iteration"], record["num_experts"] = iteration, self.num_experts
        record["layers"] = self.layers
        return record


#: What each field of a TraceShape says of a run, for messages.
_MEANING = {
    "layers": "MoE layers {} (--moe-layer-freq)",
    "num_experts": "--num-experts {}",
    "sequences": "--global-batch-size {}",
    "length": "--seq-length {}",
    "slots": "{} slots for the experts of a token (--moe-router-topk)",
}


def is_trace(file: str | Path) -> bool:
    """Whether a file is in NumPy's format, as a trace is."""
    try:
        with open(file, "rb") as stream:
            return stream.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_trace(file: str | Path, flag: str) -> np.memmap[Any, Any]:
    """The records of a trace, at least one, which are read when they are used. Raises InputError.

    `flag`: which names the file, for messages.
    """
    trace = _records(file, flag)
    if not len(trace):
        raise InputError(f"{flag} {file} has no step yet: {_REMEDY}")
    return trace


def _records(file: str | Path, flag: str) -> np.memmap[Any, Any]:
    try:
        trace = np.load(file, mmap_mode="r", allow_pickle=False, max_header_size=_HEADER_LIMIT)
    except OSError as error:
        raise InputError(f"{flag} {file}: {error.strerror or error}: {_REMEDY}") from error
    except (ValueError, EOFError) as error:
        raise InputError(f"{flag} {file} is not a trace of selections: {_REMEDY}") from error
    names = TraceShape((), 0, 0, 0, 0).dtype.names
    if not isinstance(trace, np.memmap) or trace.dtype.names != names or trace.ndim != 1:
        raise InputError(f"{flag} {file} is not a trace of selections: {_REMEDY}")
    return trace


def shape_of(trace: np.ndarray[Any, Any]) -> TraceShape:
    """The sizes of a trace with at least one record."""
    layers, *sizes = trace.dtype["experts"].shape
    first = trace[0]
    assert len(first["layers"]) == layers
    return TraceShape(tuple(map(int, first["layers"])), int(first["num_experts"]), *sizes)


def check_shape(file: str | Path, flag: str, found: TraceShape, wanted: TraceShape) -> None:
    """Raise InputError if the trace in `file` is of a run with other sizes than this run."""
    for field in fields(TraceShape):
        theirs, ours = getattr(found, field.name), getattr(wanted, field.name)
        if theirs != ours:
            meaning = _MEANING[field.name]
            raise InputError(
                f"{flag} {file} is of a run with {meaning.format(_words(theirs))}, and this run "
                f"has {_words(ours)}: use the same, or another file"
            )


def _words(value: int | tuple[int, ...]) -> str:
    return str(value) if isinstance(value, int) else " ".join(map(str, value))


class TraceWriter:
    """Appends the records of a run to a trace; each is on the disk when `append` returns."""

    def __init__(self, path: Path, shape: TraceShape, done: int, *, goes_on: bool) -> None:
        """
        Args:
            shape: of the run.
            done: the iterations before the first record to come.
            goes_on: whether a file that exists is of this run, which then appends to it. Records
                after `done` are cut, because the run produces them again. A file of which nothing
                remains gets the name *.previous.npy.

        Raises InputError if the file is of another run, and OSError.
        """
        self._path, self._dtype, self._count = path, shape.dtype, 0
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._count = _kept(path, shape, done, goes_on)
            if not self._count:
                path.replace(path.with_suffix(f".previous{path.suffix}"))
        path.touch()
        with path.open("r+b") as file:
            self._write_header(file)
            self._begin = file.tell()
            file.truncate(self._begin + self._count * self._dtype.itemsize)

    def append(self, record: np.ndarray[Any, Any]) -> None:
        """Adds the record of the next iteration: an array of one element. Raises OSError."""
        with self._path.open("r+b") as file:
            file.seek(self._begin + self._count * self._dtype.itemsize)
            file.write(record.view(np.uint8).data)
            file.flush()  # before the header counts it
            self._count += 1
            self._write_header(file)
            os.fsync(file.fileno())

    def _write_header(self, file: BinaryIO) -> None:
        """NumPy pads headers, so that this one has the same size for any number of records."""
        file.seek(0)
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self._count,)}
        np.lib.format.write_array_header_1_0(file, header)
        file.flush()


def _kept(path: Path, shape: TraceShape, done: int, goes_on: bool) -> int:
    """The number of records up to iteration `done`, with which a run goes on."""
    if done and not goes_on:
        raise InputError(
            f"{TRACE} {path} exists, and a run that goes on from another folder would overwrite "
            "it: name another file"
        )
    if not (done and path.stat().st_size):  # a process may be killed when it has created the file
        return 0
    trace = _records(path, TRACE)
    if not len(trace):
        return 0
    check_shape(path, TRACE, shape_of(trace), shape)
    iterations = trace["iteration"]
    kept = int((iterations <= done).sum())
    if kept and iterations[kept - 1] != done:
        raise InputError(
            f"{TRACE} {path} ends at iteration {iterations[kept - 1]}, and the run goes on after "
            f"{done}: name another file"
        )
    return kept
