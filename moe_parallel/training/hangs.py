"""Which rank is to blame when a job makes no progress, and the message that names it.

All ranks stop soon after one of them, because each waits in a collective for the others. The rank
to blame is therefore found in this order:

1. a rank that has sent no heartbeat for half of the timeout: its process is stopped, its host or
   network is gone, or native code holds its interpreter;
2. a rank that is not waiting in a collective;
3. if all wait, which is the case if they do not call the same collectives, or if a GPU hangs: any.

If there are several, it is the one that is furthest behind: with the lowest iteration, then with
the fewest changes of phase in it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

_NAMED = 8  # ranks in a list


@dataclass(frozen=True)
class Beat:
    """What a rank says about itself."""

    number: int  # of the beat
    host: str
    process: int
    iteration: int
    changes: int  # of phase in this iteration
    place: str  # in words: `forward of iteration 5`
    work: int  # grows while a long phase makes progress
    waits: bool  # in a collective
    stack: str | None = None  # of Python, once there has been no progress for a while

    @property
    def progress(self) -> tuple[int, int, int]:
        """Changes if, and only if, the rank makes progress."""
        return self.iteration, self.changes, self.work

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Beat:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Sighting:
    """The last beat of a rank, as another rank saw it. None: there was none yet."""

    beat: Beat | None
    silent: float  # seconds since the beat
    idle: float  # seconds since a beat that showed progress


def is_hung(sightings: Sequence[Sighting], timeout: float) -> bool:
    """Whether no rank has made progress for `timeout` seconds."""
    return min(each.idle for each in sightings) >= timeout


def blame(sightings: Sequence[Sighting], timeout: float) -> int:
    """The rank to blame for a job that is hung."""
    ranks = range(len(sightings))
    silent = [rank for rank in ranks if _is_silent(sightings[rank], timeout)]
    busy = [rank for rank in ranks if _is_busy(sightings[rank])]
    return min(silent or busy or ranks, key=lambda rank: (_order(sightings[rank]), rank))


def message(sightings: Sequence[Sighting], timeout: float) -> str:
    """The message about a job that is hung: its first line, and the stack if there is one."""
    rank = blame(sightings, timeout)
    seen = sightings[rank]
    others = {other: each for other, each in enumerate(sightings) if other != rank}
    limit = f"(--hang-timeout {timeout:g})"
    if seen.beat is None:
        return f"error: rank {rank} has not been heard since the job began {limit}{_rest(others)}"
    who = f"error: rank {rank} on {seen.beat.host} (process {seen.beat.process})"
    if _is_silent(seen, timeout):
        too = _also([other for other, each in others.items() if _is_silent(each, timeout)])
        return (
            f"{who} is silent for {seen.silent:.0f} s, last in {seen.beat.place} {limit}{too}: its "
            "process is stopped, its host or network is gone, or native code blocks its "
            f"interpreter; there is no stack of a silent rank{_rest(others)}"
        )
    hangs = f"{who} hangs in {seen.beat.place}: no rank made progress for {timeout:g} s {limit}"
    if seen.beat.waits:
        hangs += "; every rank waits in a collective, and this one is furthest behind"
    return f"{hangs}{_rest(others)}. {_stack_of(seen.beat)}"


def _is_silent(seen: Sighting, timeout: float) -> bool:
    return seen.beat is None or seen.silent >= timeout / 2


def _is_busy(seen: Sighting) -> bool:
    return seen.beat is not None and not seen.beat.waits


def _order(seen: Sighting) -> tuple[int, int]:
    return (-1, 0) if seen.beat is None else (seen.beat.iteration, seen.beat.changes)


def _also(silent: Sequence[int]) -> str:
    """The other silent ranks; of many, as when a large host is lost, the first."""
    if not silent:
        return ""
    more = f" and {len(silent) - _NAMED} more" if len(silent) > _NAMED else ""
    return f"; also silent: {', '.join(str(rank) for rank in silent[:_NAMED])}{more}"


def _rest(others: Mapping[int, Sighting]) -> str:
    """Where the other ranks are: the place of most of them."""
    places = Counter(each.beat.place for each in others.values() if each.beat is not None)
    if not places:
        return ""
    place, count = places.most_common(1)[0]
    who = f"{count} of {len(others)} others are" if count < len(others) else "all others are"
    return f"; {who} in {place}"


def _stack_of(beat: Beat) -> str:
    if beat.stack is None:
        return "Its stack did not arrive"
    return "Its Python stack, the innermost call last:\n" + beat.stack.rstrip("\n")
