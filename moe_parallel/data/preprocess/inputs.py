"""The files that a flag names: files, folders and wildcards."""

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_parallel.errors import InputError

_PACKED = (".gz", ".zst", ".bz2", ".xz")
_PLAIN_TEXT = tuple(".txt" + packed for packed in ("", *_PACKED))
# Endings of the files with records that are taken from a folder. A plain .json there is usually
# metadata.
_RECORDS = (
    ".parquet",
    *(suffix + packed for suffix in (".jsonl", ".ndjson") for packed in ("", *_PACKED)),
    *(".json" + packed for packed in _PACKED),
)


@dataclass(frozen=True)
class InputFile:
    """A file of text.

    Attributes:
        path: as it is opened.
        domain: name of the folder that was named, or else of the folder that the file is in.
        size: bytes on the disk; None: not a regular file.
        flag: that names it, for messages.
    """

    path: Path
    domain: str
    size: int | None
    flag: str

    def __str__(self) -> str:
        return f"{self.flag} {self.path}"

    @property
    def is_plain_text(self) -> bool:
        """Whether the file is one document, and not records."""
        return self.path.name.lower().endswith(_PLAIN_TEXT)


def find_inputs(words: Sequence[str], flag: str = "--input") -> list[InputFile]:
    """The files that the words of a flag name, word by word, each word's in order of their paths.

    A word is a file; a folder, from which all files with the suffix of a known format are taken,
    at any depth, hidden ones excepted; or a pattern with `*`, `?`, `[...]` and `**`. Plain text is
    taken from a folder only if it has no records, because text next to records describes them.

    Raises:
        InputError: a word that names nothing, a folder without text, a file that is named twice, or
            a pipe or device that is found in a folder and not named.
    """
    found = [each for word in words for each in _of_word(word, flag)]
    seen: set[str] = set()
    for each in found:
        place = os.path.realpath(each.path)
        if place in seen:
            raise InputError(f"{flag} names {each.path} twice: name each file once")
        seen.add(place)
        if each.size is None and each.path not in map(Path, words):
            raise InputError(f"{each} is not a regular file: take it away, or name it as {flag}")
    return found


def _of_word(word: str, flag: str) -> Iterator[InputFile]:
    if os.path.lexists(word) or not glob.has_magic(word):
        yield from _of_path(word, flag)
        return
    matches = sorted(glob.glob(word, recursive=True))
    # `**` also matches what is in a folder that it matches.
    files = [each for each in matches if not os.path.isdir(each)]
    if not files:
        for folder in matches:
            yield from _of_path(folder, flag)
    for each in files:
        yield _file(each, _name(os.path.dirname(each)), flag)
    if not matches:
        raise InputError(f"{flag} {word} matches no file: check the pattern")


def _of_path(word: str, flag: str) -> Iterator[InputFile]:
    if not os.path.isdir(word):
        yield _file(word, _name(os.path.dirname(word)), flag)
        return
    files = list(_files_in(word, flag))
    taken = _ending_in(_RECORDS, files) or _ending_in(_PLAIN_TEXT, files)
    if not taken:
        raise InputError(
            f"{flag} {word} is a folder without text: no file in it ends in .txt, .jsonl, .ndjson, "
            ".parquet, .txt.gz, .json.gz, .jsonl.zst or the like"
        )
    for each in sorted(taken):
        yield _file(each, _name(word), flag)


def _files_in(folder: str, flag: str) -> Iterator[str]:
    """Those at any depth, hidden ones excepted."""

    def fail(error: OSError) -> None:
        raise _unreadable(error, flag) from None

    for place, inner, names in os.walk(folder, onerror=fail):
        inner[:] = [each for each in inner if not each.startswith(".")]
        yield from (os.path.join(place, name) for name in names if not name.startswith("."))


def _ending_in(endings: tuple[str, ...], files: Sequence[str]) -> list[str]:
    return [each for each in files if each.lower().endswith(endings)]


def _name(folder: str) -> str:
    return os.path.basename(os.path.realpath(folder or ".")) or "text"


def _file(path: str, domain: str, flag: str) -> InputFile:
    try:
        size = os.path.getsize(path) if os.path.isfile(path) else None
        os.stat(path)
    except OSError as error:
        raise _unreadable(error, flag) from None
    return InputFile(Path(path), domain, size, flag)


def _unreadable(error: OSError, flag: str) -> InputError:
    return InputError(f"{flag} {error.filename} cannot be read ({error.strerror})")
