"""Carry the finished runs of a study to another machine, in one small file.

    python tools/study/study_archive.py pack studies/first first.tar.gz
    python tools/study/study_archive.py unpack first.tar.gz studies/first

`pack` stores what the report reads of the runs that have ended, and no checkpoints. `unpack` adds
them to a study's folder, new or not, and refuses those of another study. The command of the study
then continues with the other runs. docs/study.md has an example.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import tarfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from folder_lock import alone

from moe_parallel.analysis.study.folder import STUDY_MANIFEST, Cell, StudyFolder, StudyManifest
from moe_parallel.analysis.study.pilots import pilot_cells, read_sweep
from moe_parallel.data.atomic_files import staging, write_atomically
from moe_parallel.errors import InputError
from moe_parallel.telemetry.metrics import METRICS_FILE
from moe_parallel.tool import Tool

#: The files of a run that reports read, and its output.
KEPT = (METRICS_FILE, "attempts.jsonl", "starts.jsonl", "config.yaml", "cell.yaml", "output.txt")
#: The members that are read from an archive: no other path is ever written.
_WORD = r"[A-Za-z0-9][A-Za-z0-9_.+-]*"
_MEMBER = re.compile(rf"(cells|pilots)/{_WORD}/{_WORD}/({'|'.join(map(re.escape, KEPT))})")
_MEMBER_BYTES_MAX = 64 * 2**20


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    commands = tool.add_commands()
    pack_command = commands.add_parser("pack", help="store the runs that have ended")
    pack_command.add_argument("study", type=Path, help="the folder that --output named")
    pack_command.add_argument("archive", type=Path, help="the file to write, .tar.gz")
    unpack_command = commands.add_parser("unpack", help="add the runs of an archive to a study")
    unpack_command.add_argument("archive", type=Path, help="the file that `pack` wrote")
    unpack_command.add_argument("study", type=Path, help="the folder of the study, new or not")
    return tool.run(arguments, _work)


def _work(own: Namespace) -> None:
    folder = StudyFolder(own.study)
    if own.command == "pack":
        number = pack(folder, own.archive)
        size = own.archive.stat().st_size / 2**10
        print(f"{own.archive}: {number} runs that have ended, {size:,.0f} KiB")
    else:
        added, known = unpack(own.archive, folder)
        print(f"{own.study}: {added} runs added, {known} were there already")


def pack(folder: StudyFolder, archive: Path) -> int:
    """Write the runs of the study that have ended, and return their number. The study may be at
    work. Raises InputError if there is no such run."""
    manifest = folder.manifest()
    if manifest is None:
        raise InputError(f"{folder.path} does not contain a study: name the folder of --output")
    ended = [cell for cell in _cells(folder, manifest) if _has_ended(manifest, cell)]
    if not ended:
        raise InputError(f"{folder.path} has no finished run yet: let the study train one")
    temporary = archive.with_name(f"{archive.name}.writing-{os.getpid()}")
    try:
        with tarfile.open(temporary, "w:gz") as tar:
            text = manifest.to_json().encode()
            entry = tarfile.TarInfo(STUDY_MANIFEST)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))
            for cell in ended:
                for path in filter(Path.is_file, (cell.folder / name for name in KEPT)):
                    tar.add(path, str(path.relative_to(folder.path)), filter=_of_nobody)
        temporary.replace(archive)
    finally:
        temporary.unlink(missing_ok=True)
    return len(ended)


def _of_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def unpack(archive: Path, folder: StudyFolder) -> tuple[int, int]:
    """Add the runs of the archive to the folder. A run that has not ended there is replaced.

    Returns the number of runs that were added, and of those that had ended there already. Raises
    InputError if the archive cannot be read, or is of another study.
    """
    with alone(folder), staging(folder.path / "archive") as place:
        ours, theirs = folder.manifest(), StudyFolder(place)
        manifest = _extract(archive, theirs)
        if ours is not None:
            try:
                manifest = ours.merged_with(manifest)
            except InputError as error:
                raise InputError(f"{archive}: {error}") from None
        # First the manifest: a folder of runs without one is not a study.
        write_atomically(folder.path / STUDY_MANIFEST, manifest.to_json())
        added = known = 0
        for cell in _cells(theirs, manifest):
            if not cell.folder.is_dir():
                continue
            target = folder.path / cell.folder.relative_to(theirs.path)
            if ours is not None and _has_ended(manifest, _at(cell, target)):
                known += 1
                continue
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            cell.folder.rename(target)
            added += 1
    return added, known


def _extract(archive: Path, place: StudyFolder) -> StudyManifest:
    """Write the known members of the archive to `place`; returns the manifest."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                known = member.name == STUDY_MANIFEST or _MEMBER.fullmatch(member.name)
                if not known or not member.isfile() or member.size > _MEMBER_BYTES_MAX:
                    raise InputError(
                        f"{archive} has a member {member.name!r}: it is not an archive of a study"
                    )
                file = tar.extractfile(member)
                assert file is not None  # it is a regular file
                path = place.path / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise InputError(
            f"{archive} cannot be read ({error}): name a file that `pack` wrote"
        ) from None
    if not (place.path / STUDY_MANIFEST).is_file():
        raise InputError(f"{archive} has no {STUDY_MANIFEST}: name a file that `pack` wrote")
    manifest = place.manifest()
    assert manifest is not None
    return manifest


def _cells(folder: StudyFolder, manifest: StudyManifest) -> Iterator[Cell]:
    """All runs that are known so far, pilot runs first."""
    if manifest.design.lr_grid:
        for name in manifest.contenders:
            yield from pilot_cells(folder, manifest, name, read_sweep(folder, manifest, name))
    yield from folder.cells(manifest.seeds)


def _has_ended(manifest: StudyManifest, cell: Cell) -> bool:
    """Whether the run is over and its process has ended, which wrote its last line then."""
    return bool(cell.attempts()) and manifest.is_over(cell)


def _at(cell: Cell, folder: Path) -> Cell:
    return Cell(cell.contender, cell.seed, folder, cell.lr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
