"""The bounds of a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_parallel.config.message import shown
from moe_parallel.errors import InputError

# Far above any useful value. A mistyped number must not fill the memory or overflow fp32.
_INTEGER_AT_MOST = 2**31 - 1
_FLOAT_AT_MOST = 1_000_000
_FLOAT_ABOVE_0_AT_LEAST = 1e-30


@dataclass(frozen=True)
class Bounds:
    """The bounds of a number. None: no specific bound on that side."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def check(self, flag: str, value: Any) -> None:
        """Raise InputError, with `flag` in its message, if the number is out of bounds."""
        if type(value) not in (int, float):
            return
        if self.least is not None and not value >= self.least:
            raise InputError(f"{flag} is {value}: it must be at least {self.least}")
        if self.above is not None and not value > self.above:
            raise InputError(f"{flag} is {value}: it must be above {self.above}")
        if self.below is not None and not value < self.below:
            raise InputError(f"{flag} is {shown(value)}: it must be below {self.below}")
        most = self.most
        if most is None:
            most = _INTEGER_AT_MOST if type(value) is int else _FLOAT_AT_MOST
        if value > most:
            raise InputError(f"{flag} is {shown(value)}: it must be at most {most}")
        if 0 < value < _FLOAT_ABOVE_0_AT_LEAST:
            raise InputError(
                f"{flag} is {value}, too small for fp32: it must be at least "
                f"{_FLOAT_ABOVE_0_AT_LEAST}, or 0 where that means off"
            )
