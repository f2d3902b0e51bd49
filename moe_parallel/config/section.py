"""The base class of the sections of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class Section:
    """A frozen dataclass of options, with the rules between them and the other sections."""

    def check(self, config: Config, world_size: int) -> None:
        """Raise InputError for the first rule that this section of `config` breaks.

        Each value has already been checked against its bounds (`Option.check`). A subclass first
        calls this method of its parent.
        """
