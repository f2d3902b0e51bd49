"""What every part of the configuration is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class Section:
    """A frozen dataclass of options, with the rules that tie them to each other and to the rest."""

    def check(self, config: Config, world_size: int) -> None:
        """Raise InputError for the first rule that this section breaks as a part of `config`.

        Single values are in their bounds already (`Option.check`). A subclass calls this method
        of its parent first.
        """
