"""A failure on one rank becomes the same failure on every rank.

If a rank raises between two collectives, the other ranks wait for it forever. An action that can
fail on only one rank (a write, a read) is therefore called through `agree`. It lets all ranks
finish, exchanges the results, and raises on every rank or on none.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from moe_parallel.errors import Busy, Damaged, InputError

Returned = TypeVar("Returned")


class StorageError(Exception):
    """A file could not be written or read. The message is one line: the path and the reason."""


def exchange(value: Returned, group: dist.ProcessGroup | None = None) -> list[Returned]:
    """Every rank's picklable `value`, in rank order.

    `group`: contains all ranks; None: the default group. A thread that runs during training needs
    its own.
    """
    gathered: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group)
    return gathered


def agree(action: Callable[[], Returned], group: dist.ProcessGroup | None = None) -> Returned:
    """Call `action` on every rank and return this rank's result.

    Every rank must call this. If `action` fails on any rank, every rank raises. An InputError or
    StorageError is the same on all ranks; an OSError becomes a StorageError. The rank that failed
    raises any other exception unchanged, and the others raise a RuntimeError that names that rank.
    `group`: see `exchange`.
    """
    result: Returned
    own: Exception | None = None
    try:
        result = action()
    except OSError as error:
        own = StorageError(one_line(error))
        own.__cause__ = error
    except Exception as error:  # the other ranks must learn of every failure
        own = error
    notes = exchange(None if own is None else _note(own), group)
    for failed_rank, note in enumerate(notes):
        if note is not None:
            _raise(failed_rank, note, own)
    return result


def on_rank_0(action: Callable[[], object], group: dist.ProcessGroup | None = None) -> None:
    """Call `action` on rank 0 only, with the rules of `agree`: every rank must call this."""
    agree(action if dist.get_rank() == 0 else lambda: None, group)


def rank_0_first(action: Callable[[], Returned]) -> Returned:
    """Call `action` on rank 0, then on the others, which find the files that rank 0 has written.

    The rules of `agree` apply. Without a process group, `action` is called once.
    """
    if not dist.is_initialized():
        return action()
    on_rank_0(action)
    return agree(action)


def one_line(error: OSError) -> str:
    """The path and the reason of an OSError, without its number and with escapes for what a
    terminal would obey, or could not print."""
    reason = error.strerror or " ".join(map(str, error.args)) or type(error).__name__
    text = f"{error.filename}: {reason}" if error.filename else reason
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _note(error: Exception) -> tuple[type[Exception], str]:
    """The type and message for the other ranks; not all exceptions of libraries pickle."""
    shared = (Busy, Damaged, InputError, StorageError)  # a class after its subclasses
    kind = next((kind for kind in shared if isinstance(error, kind)), RuntimeError)
    return kind, str(error)


def _raise(failed_rank: int, note: tuple[type[Exception], str], own: Exception | None) -> None:
    kind, message = note
    if kind is not RuntimeError:
        raise kind(message) from own
    if own is not None:
        raise own
    raise RuntimeError(f"rank {failed_rank} failed: {message}")
