"""corm: the K experts that a token suits more than it suits the mean token. The options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.option import option
from moe_parallel.config.selection.balancing import Balancing
from moe_parallel.config.selection.parts import DispatchedSelection, FixedChoices
from moe_parallel.config.selection.selection import LayerWeights
from moe_parallel.config.selection.time_constant import TimeConstant

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class CoRMSelection(Balancing, FixedChoices, DispatchedSelection, system="corm"):
    """CoRM: the K experts whose queries are nearer to a token's key than at the mean token."""

    corm_key_size: int = option(
        64,
        "d_2, the width of the keys and queries by which experts are scored",
        weights=True,
        least=1,
    )
    corm_reference_rate: float = option(
        0.01,
        "alpha, the share of the way that a layer's reference, a running mean of its tokens, moves "
        "after a step to the mean token of that step",
        above=0,
        most=1,
    )

    @property
    def renormalizes(self) -> bool:
        return self.moe_router_topk > 1

    def layer_weights(self, hidden_size: int, num_experts: int, expert_width: int) -> LayerWeights:
        weights = super().layer_weights(hidden_size, num_experts, expert_width)
        return weights._replace(replicated=(1 + num_experts) * self.corm_key_size * hidden_size)

    def time_constants(self, config: Config) -> list[TimeConstant]:
        steps = 1 / self.corm_reference_rate
        own = TimeConstant("reference of CoRM", steps, "raise --corm-reference-rate")
        return [*super().time_constants(config), own]
