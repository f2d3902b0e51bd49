"""The files that --input names: files, folders and wildcards."""

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_parallel.errors import InputError

# Endings of the files that are taken from a folder. A plain .json there is usually metadata.
_ENDINGS = tuple(
    suffix + packed
    for suffix in (".jsonl", ".ndjson", ".parquet", ".json")
    for packed in ("", ".gz", ".zst")
    if suffix + packed != ".json"
)


@dataclass(frozen=True)
class InputFile:
    """A file of text.

    Attributes:
        path: as it is opened.
        domain: name of the --input folder, or else of the folder that the file is in.
        size: bytes on the disk; None: not a regular file.
    """

    path: Path
    domain: str
    size: int | None


def find_inputs(words: Sequence[str]) -> list[InputFile]:
    """The files that the words of --input name, word by word, each word's in order of their paths.

    A word is a file; a folder, from which all files with the suffix of a known format are taken,
    at any depth, hidden ones excepted; or a pattern with `*`, `?`, `[...]` and `**`.

    Raises:
        InputError: a word that names nothing, a folder without text, or a file that is named twice.
    """
    found = [each for word in words for each in _of_word(word)]
    seen: set[str] = set()
    for each in found:
        place = os.path.realpath(each.path)
        if place in seen:
            raise InputError(f"--input names {each.path} twice: name each file once")
        seen.add(place)
    return found


def _of_word(word: str) -> Iterator[InputFile]:
    if os.path.lexists(word) or not glob.has_magic(word):
        yield from _of_path(word)
        return
    matches = sorted(glob.glob(word, recursive=True))
    # `**` also matches what is in a folder that it matches.
    files = [each for each in matches if not os.path.isdir(each)]
    if not files:
        for folder in matches:
            yield from _of_path(folder)
    for each in files:
        yield _file(each, _name(os.path.dirname(each)))
    if not matches:
        raise InputError(f"--input {word} matches no file: check the pattern")


def _of_path(word: str) -> Iterator[InputFile]:
    if not os.path.isdir(word):
        yield _file(word, _name(os.path.dirname(word)))
        return
    files = []
    for folder, inner, names in os.walk(word, onerror=_raise):
        inner[:] = [each for each in inner if not each.startswith(".")]
        files += [os.path.join(folder, name) for name in names if _is_text(name)]
    if not files:
        raise InputError(
            f"--input {word} is a folder without text: no file in it ends in .jsonl, .ndjson, "
            ".parquet, .jsonl.gz, .json.gz, .jsonl.zst or the like"
        )
    for each in sorted(files):
        yield _file(each, _name(word))


def _is_text(name: str) -> bool:
    return name.lower().endswith(_ENDINGS) and not name.startswith(".")


def _name(folder: str) -> str:
    return os.path.basename(os.path.realpath(folder or ".")) or "text"


def _file(path: str, domain: str) -> InputFile:
    try:
        size = os.path.getsize(path) if os.path.isfile(path) else None
        os.stat(path)
    except OSError as error:
        _raise(error)
    return InputFile(Path(path), domain, size)


def _raise(error: OSError) -> None:
    raise InputError(f"--input {error.filename} cannot be read ({error.strerror})") from None
