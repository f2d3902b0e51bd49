"""The folder of --moe-router-trace: which experts each token took, in every step of a run.

It has a file of NumPy for each step, `<iteration>.npz`, with these arrays:

version       int32, 2
num_experts   int32, E; with free experts, which have the last numbers, E + Z
layers        int16 [L], the numbers of the MoE layers in the model, from 1
text          uint32 [N], the CRC-32 of the tokens (int64, little-endian) of each sequence
experts       int16 [L, N, S, K], what each token chose: best choice first, -1 in an empty slot

    numpy.load("trace/7.npz")["experts"][0, 2, 100]    # first MoE layer, sequence 2, position 100

Iterations count from 1, and those of a folder are successive. A file is complete when it gets its
name, so a process that is killed leaves all complete steps.

A folder with the choices of other programs (`routed_experts`) has the same arrays in files called
`texts-NAME.npz`. They belong to no iteration: the choices of a sequence are found by its text.

Shape suffixes: L MoE layers, N sequences of a global batch, S tokens of a sequence, K slots per
token. The sequences are in the order in which data are read, micro-batch after micro-batch. Choices
that a capacity drops are included.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from moe_parallel.data.atomic_files import flush_to_disk, remove, write_atomically
from moe_parallel.errors import InputError
from moe_parallel.reading import open_regular

TRACE, REPLAY = "--moe-router-trace", "--moe-router-replay"
_VERSION = 2
_REMEDY = f"name the folder that a run with {TRACE} has written"


@dataclass(frozen=True)
class TraceShape:
    """The sizes of the model and the batches of a trace."""

    layers: tuple[int, ...]  # the numbers of the MoE layers, from 1
    num_experts: int  # E
    sequences: int  # N
    length: int  # S
    slots: int  # K


#: What each field of a TraceShape says of a run, for messages.
_MEANING = {
    "layers": "MoE layers {} (--moe-layer-freq)",
    "num_experts": "--num-experts {}",
    "sequences": "--global-batch-size {}",
    "length": "--seq-length {}",
    "slots": "{} slots for the experts of a token (--moe-router-topk)",
}


@dataclass(frozen=True)
class TraceStep:
    """The choices of a step, and the CRC-32 of its text."""

    text_N: np.ndarray[Any, Any]
    experts_LNSK: np.ndarray[Any, Any]


@dataclass(frozen=True)
class RecordedTrace:
    """A folder whose steps are read when they are used."""

    folder: Path
    flag: str  # which names the folder, for messages
    shape: TraceShape
    iterations: range

    def step(self, iteration: int) -> TraceStep:
        """Raises InputError."""
        file = _file(self.folder, iteration)
        shape, step = _read(file, self.flag)
        check_shape(file, self.flag, shape, self.shape)
        return step


@dataclass(frozen=True)
class RecordedTexts:
    """A folder of choices by text, which are read when they are used."""

    folder: Path
    flag: str
    shape: TraceShape  # `sequences`: of all files
    places: dict[int, tuple[Path, int]]  # by CRC-32: a file, and the place in it

    def step(self, text_N: np.ndarray[Any, Any]) -> TraceStep:
        """The choices of these texts; 0 is a sequence of another rank. Raises InputError."""
        shape, steps = self.shape, {}
        sizes = (len(shape.layers), len(text_N), shape.length, shape.slots)
        experts_LNSK = np.zeros(sizes, np.int16)
        for number in np.flatnonzero(text_N):
            place = self.places.get(int(text_N[number]))
            if place is None:
                raise InputError(
                    f"{self.flag} {self.folder} has {shape.sequences} texts, and not that of "
                    f"sequence {number + 1} of this step: train on these texts alone, each a "
                    "document of --seq-length tokens"
                )
            file, row = place
            if file not in steps:
                steps[file] = _read(file, self.flag)[1]
            experts_LNSK[:, number] = steps[file].experts_LNSK[:, row]
        return TraceStep(text_N, experts_LNSK)


def read_replay(folder: str | Path, flag: str) -> RecordedTrace | RecordedTexts:
    """A trace, or choices by text if there are such files. Raises InputError."""
    folder = Path(folder)
    files = sorted(folder.glob("texts-*.npz"))
    if not files:
        return read_trace(folder, flag)
    shape: TraceShape | None = None
    places: dict[int, tuple[Path, int]] = {}
    for file in files:
        its, step = _read(file, flag)
        shape = replace(its, sequences=0) if shape is None else shape
        check_shape(file, flag, replace(its, sequences=0), shape)
        for row, text in enumerate(map(int, step.text_N)):
            if text in places:
                raise InputError(
                    f"{flag} {file} has a text a second time, at {row + 1}; it is in "
                    f"{places[text][0].name}, too: leave one of them out"
                )
            places[text] = file, row
    assert shape is not None
    return RecordedTexts(folder, flag, replace(shape, sequences=len(places)), places)


def read_trace(folder: str | Path, flag: str) -> RecordedTrace:
    """A trace with at least one step. Raises InputError.

    `flag`: which names the folder, for messages.
    """
    folder = Path(folder)
    iterations = _iterations(folder, flag)
    if not iterations:
        raise InputError(f"{flag} {folder} has no step: {_REMEDY}")
    shape, _ = _read(_file(folder, iterations[0]), flag)
    return RecordedTrace(folder, flag, shape, iterations)


def _file(folder: Path, iteration: int) -> Path:
    return folder / f"{iteration}.npz"


def _is_step(name: str) -> bool:
    return re.fullmatch(r"[1-9][0-9]*\.npz", name) is not None


def _iterations(folder: Path, flag: str) -> range:
    """The iterations whose steps are in the folder. Raises InputError."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise InputError(f"{flag} {folder}: {error.strerror or error}: {_REMEDY}") from error
    found = {int(name[:-4]) for name in names if _is_step(name)}
    successive = range(min(found), max(found) + 1) if found else range(0)
    if len(found) != successive.stop - successive.start:
        lacking = next(number for number in successive if number not in found)
        raise InputError(f"{flag} {folder} lacks the step of iteration {lacking}: {_REMEDY}")
    return successive


def is_texts(name: str) -> bool:
    """Whether a file of this name has choices by text."""
    return re.fullmatch(r"texts-.+\.npz", name) is not None


def crc_of(tokens_S: np.ndarray[Any, Any]) -> int:
    """The CRC-32 of a text."""
    return zlib.crc32(tokens_S.astype("<i8").tobytes())


def _read(file: Path, flag: str) -> tuple[TraceShape, TraceStep]:
    """Raises InputError."""
    names = ("version", "num_experts", "layers", "text", "experts")
    try:
        with open_regular(file) as opened, np.load(opened, allow_pickle=False) as arrays:
            version, num_experts, layers, text_N, experts_LNSK = (arrays[name] for name in names)
        sizes = experts_LNSK.shape
        if (
            not version.shape == num_experts.shape == ()
            or version != _VERSION
            or (experts_LNSK.dtype, text_N.dtype, len(sizes)) != (np.int16, np.uint32, 4)
            or (layers.shape, text_N.shape) != (sizes[:1], sizes[1:2])
        ):
            raise ValueError
        shape = TraceShape(tuple(map(int, layers)), int(num_experts), *sizes[1:])
    except OSError as error:
        raise InputError(f"{flag} {file}: {error.strerror or error}: {_REMEDY}") from error
    except (
        AttributeError,  # another file of NumPy is an array
        EOFError,
        LookupError,
        MemoryError,  # a size that is damaged
        OverflowError,
        RuntimeError,  # zipfile's for what it does not read
        TypeError,
        ValueError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise InputError(
            f"{flag} {file} is damaged, or not a step of a trace of version {_VERSION}: {_REMEDY}"
        ) from error
    return shape, TraceStep(text_N, experts_LNSK)


def check_shape(place: str | Path, flag: str, found: TraceShape, wanted: TraceShape) -> None:
    """Raise InputError if the trace in `place` is of a run with other sizes than this run."""
    for field in fields(TraceShape):
        theirs, ours = getattr(found, field.name), getattr(wanted, field.name)
        if theirs != ours:
            meaning = _MEANING[field.name]
            raise InputError(
                f"{flag} {place} is of a run with {meaning.format(_words(theirs))}, and this run "
                f"has {_words(ours)}: use the same, or another trace"
            )


def _words(value: int | tuple[int, ...]) -> str:
    return str(value) if isinstance(value, int) else " ".join(map(str, value))


class TraceWriter:
    """Adds the steps of a run to a trace; each is on the disk when `append` returns."""

    def __init__(self, folder: Path, shape: TraceShape, done: int, *, goes_on: bool) -> None:
        """
        Args:
            shape: of the run.
            done: the iterations before the first step to come.
            goes_on: whether a folder that exists is of this run, which then adds to it. Steps after
                `done` are removed, because the run produces them again. A folder of which nothing
                would remain gets the name *.previous.

        Raises InputError if the folder is of another run or has other files, and OSError.
        """
        self._folder = folder
        self._shape = shape
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob("[1-9]*.npz.writing-*"):  # of a process that was killed
            with suppress(OSError):
                unfinished.unlink()
        names = [path.name for path in folder.iterdir()]
        if others := [n for n in names if not _is_step(n.partition(".writing-")[0])]:
            raise InputError(
                f"{TRACE} {folder} has other files, such as {min(others)}: name another folder"
            )
        there = _iterations(folder, TRACE)
        if there and done and not goes_on:
            raise InputError(
                f"{TRACE} {folder} exists, and a run that continues from another folder would "
                "overwrite it: name another folder"
            )
        if not there:
            return
        if done < there[0]:
            previous = folder.with_name(f"{folder.name}.previous")
            remove(previous)
            folder.rename(previous)
            folder.mkdir()
            return
        check_shape(folder, TRACE, read_trace(folder, TRACE).shape, shape)
        if there[-1] < done:
            raise InputError(
                f"{TRACE} {folder} ends at iteration {there[-1]}, and the run continues after "
                f"{done}: name another folder"
            )
        for iteration in reversed(range(done + 1, there[-1] + 1)):  # so that no gap is ever left
            _file(folder, iteration).unlink()

    def append(self, iteration: int, step: TraceStep) -> None:
        """Adds the next iteration. Raises OSError; then the folder is as it was."""
        write_step(_file(self._folder, iteration), self._shape, step)


def write_step(file: Path, shape: TraceShape, step: TraceStep) -> None:
    """Writes a file of a trace, which is on the disk on return. Raises OSError."""
    arrays: dict[str, Any] = {
        "version": np.array(_VERSION, "<i4"),
        "num_experts": np.array(shape.num_experts, "<i4"),
        "layers": np.array(shape.layers, "<i2"),
        "text": step.text_N.astype("<u4"),
        "experts": step.experts_LNSK.astype("<i2"),
    }
    content = io.BytesIO()
    np.savez(content, **arrays)
    write_atomically(file, content.getvalue())
    flush_to_disk(file.parent)
