"""The file of --moe-router-trace: which experts each token took, in every step of a run.

It is an .npz file of NumPy with four arrays:

version       int32, 1
num_experts   int32, E; with free experts, which have the last numbers, E + Z
layers        int16 [L], the numbers of the MoE layers in the model, from 1
steps         [R], a record for each step, with three fields:
  iteration     int64, from 1; records are of successive iterations
  text          uint32 [N], the CRC-32 of the tokens (int64, little-endian) of each sequence
  experts       int16 [L, N, S, K], what each token chose: best choice first, -1 in an empty slot

    steps = numpy.load("trace.npz")["steps"]
    steps["experts"][6, 0, 2, 100]     # record 6, first MoE layer, sequence 2, position 100

NumPy reads all steps into memory; `read_trace` maps the file. Before this form a trace was a .npy
file, an array of records with `num_experts` and `layers` as further fields. Such files are read.

Shape suffixes: R records, L MoE layers, N sequences of a global batch, S tokens of a sequence, K
slots per token. The sequences are in the order in which data are read, micro-batch after
micro-batch. Choices that a capacity drops are included. A process that is killed leaves a file with
all complete steps (`growing_npz`).
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from moe_parallel.errors import InputError
from moe_parallel.telemetry.growing_npz import GrowingNpz, mapped

TRACE, REPLAY = "--moe-router-trace", "--moe-router-replay"
_VERSION = 1
_STEPS = "steps"
_NPY, _ZIP = np.lib.format.MAGIC_PREFIX, b"PK\3\4"  # how .npy and .npz files begin

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
                ("text", "<u4", (self.sequences,)),
                ("experts", "<i2", (layers, self.sequences, self.length, self.slots)),
            ]
        )

    def record(self, iteration: int) -> np.ndarray[Any, Any]:
        """A record without text and experts: an array of one element."""
        record = np.zeros(1, self.dtype)
        record["iteration"] = iteration
        return record

    @property
    def fixed(self) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays of a file besides its records."""
        return {
            "version": np.array(_VERSION, "<i4"),
            "num_experts": np.array(self.num_experts, "<i4"),
            "layers": np.array(self.layers, "<i2"),
        }


#: What each field of a TraceShape says of a run, for messages.
_MEANING = {
    "layers": "MoE layers {} (--moe-layer-freq)",
    "num_experts": "--num-experts {}",
    "sequences": "--global-batch-size {}",
    "length": "--seq-length {}",
    "slots": "{} slots for the experts of a token (--moe-router-topk)",
}


@dataclass(frozen=True)
class RecordedTrace:
    """A file that was read. Its records are read when they are used."""

    shape: TraceShape
    records: np.memmap[Any, Any]


def is_trace(file: str | Path) -> bool:
    """Whether a file is one of NumPy's, as a trace is."""
    return _begins(file, _ZIP) or _begins(file, _NPY)


def _begins(file: str | Path, magic: bytes) -> bool:
    try:
        with open(file, "rb") as stream:
            return stream.read(len(magic)) == magic
    except OSError:
        return False


def read_trace(file: str | Path, flag: str) -> RecordedTrace:
    """A trace with at least one record. Raises InputError.

    `flag`: which names the file, for messages.
    """
    trace = _read(file, flag)
    if not len(trace.records):
        raise InputError(f"{flag} {file} has no step yet: {_REMEDY}")
    return trace


def _read(file: str | Path, flag: str) -> RecordedTrace:
    try:
        trace = _of_npy(file) if _begins(file, _NPY) else _of_npz(file)
        _check_records(trace)
    except OSError as error:
        raise InputError(f"{flag} {file}: {error.strerror or error}: {_REMEDY}") from error
    except ValueError as error:
        raise InputError(
            f"{flag} {file} is not a trace of selections: {error}; {_REMEDY}"
        ) from error
    return trace


def _of_npz(file: str | Path) -> RecordedTrace:
    """Raises OSError, and ValueError with the reason."""
    records = mapped(file, _STEPS)
    try:
        with np.load(file, allow_pickle=False) as arrays:
            version, num_experts = int(arrays["version"]), int(arrays["num_experts"])
            layers = tuple(map(int, arrays["layers"]))
    except (LookupError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError("it has no version, num_experts and layers") from error
    if version != _VERSION:
        raise ValueError(f"its version is {version}, and this program reads version {_VERSION}")
    return RecordedTrace(_shape(layers, num_experts, records.dtype), records)


def _of_npy(file: str | Path) -> RecordedTrace:
    """A trace in its first form. Raises OSError, and ValueError with the reason."""
    try:
        records = np.load(file, mmap_mode="r", allow_pickle=False, max_header_size=_HEADER_LIMIT)
    except (ValueError, EOFError) as error:
        raise ValueError("it is cut, or has another array") from error
    names = records.dtype.names
    if names != ("iteration", "num_experts", "layers", "text", "experts") or records.ndim != 1:
        raise ValueError("it has another array")
    if not len(records):
        raise ValueError("it has no step")
    layers = tuple(map(int, records[0]["layers"]))
    return RecordedTrace(_shape(layers, int(records[0]["num_experts"]), records.dtype), records)


def _shape(layers: tuple[int, ...], num_experts: int, record: np.dtype[Any]) -> TraceShape:
    """Raises ValueError if the records are not those of a trace."""
    if record.names is None or "experts" not in record.names:
        raise ValueError(f"its array {_STEPS} has no field experts")
    sizes = record["experts"].shape
    if len(sizes) != 4 or sizes[0] != len(layers):
        raise ValueError("its field experts has wrong dimensions")
    return TraceShape(layers, num_experts, *sizes[1:])


def _check_records(trace: RecordedTrace) -> None:
    """Raises ValueError if the records are not those of a trace."""
    wanted, found = trace.shape.dtype, trace.records.dtype
    for name in wanted.names or ():
        if name not in (found.names or ()) or found[name] != wanted[name]:
            raise ValueError(f"its field {name} is missing or of another type")
    iterations = trace.records["iteration"]
    if len(iterations) and (iterations[0] < 1 or (np.diff(iterations) != 1).any()):
        raise ValueError("its iterations are not successive")


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
                remains gets the name *.previous.npz.

        Raises InputError if the file is of another run, and OSError.
        """
        self._file = GrowingNpz(path, shape.fixed, _STEPS, shape.dtype)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = 0
        if path.exists():
            kept = self._kept(path, shape, done, goes_on)
            if not kept:
                path.replace(path.with_suffix(f".previous{path.suffix}"))
        if kept:
            self._file.keep(kept)
        else:
            self._file.begin()

    def append(self, record: np.ndarray[Any, Any]) -> None:
        """Adds the record of the next iteration: an array of one element. Raises OSError."""
        self._file.append(record)

    def _kept(self, path: Path, shape: TraceShape, done: int, goes_on: bool) -> int:
        """The number of records up to iteration `done`, after which a run continues."""
        if done and not goes_on:
            raise InputError(
                f"{TRACE} {path} exists, and a run that continues from another folder would "
                "overwrite it: name another file"
            )
        if not (done and path.stat().st_size):  # a process may be killed when it has made the file
            return 0
        trace = _read(path, TRACE)
        if not len(trace.records):
            return 0
        check_shape(path, TRACE, trace.shape, shape)
        if not self._file.made(trace.records):
            raise InputError(
                f"{TRACE} {path} was not written by this version of the program, so a run cannot "
                "append to it: name another file"
            )
        iterations = trace.records["iteration"]
        kept = int((iterations <= done).sum())
        if kept and iterations[kept - 1] != done:
            raise InputError(
                f"{TRACE} {path} ends at iteration {iterations[kept - 1]}, and the run continues "
                f"after {done}: name another file"
            )
        return kept
