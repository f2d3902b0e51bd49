"""hash: the id of a token selects its experts, by a frozen table. It is a control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.selection.kinds import RoutedSelection
from moe_parallel.config.selection.parts import FixedNumber

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class HashSelection(FixedNumber, RoutedSelection, system="hash"):
    """A frozen table gives each token id K experts, and a router weights them: a control."""

    @property
    def renormalizes(self) -> bool:
        return self.moe_router_topk > 1

    @property
    def reads_token_ids(self) -> bool:
        return True
