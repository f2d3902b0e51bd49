"""aoe: the K experts with the largest norm ||x W_down|| (Autonomy-of-Experts). The options."""

from __future__ import annotations

from dataclasses import dataclass

from moe_parallel.config.option import option, with_default
from moe_parallel.config.selection.balancing import BiasBalancing
from moe_parallel.config.selection.kinds import AutonomousSelection
from moe_parallel.config.selection.parts import TopKChoices


@dataclass(frozen=True)
class AoESelection(TopKChoices, AutonomousSelection, system="aoe"):
    """Autonomy-of-Experts: the K experts with the largest norms; there is no router."""

    # Larger than for probabilities: norms differ by tenths, probabilities by hundredths.
    moe_router_bias_update_rate: float | None = with_default(
        BiasBalancing, "moe_router_bias_update_rate", 1e-2
    )
    aoe_gate: str = option(
        "selected",
        "routing probabilities: softmax over the norms of the chosen experts (selected), or "
        "over all norms, not renormalized (all)",
        choices=("selected", "all"),
        weights=True,
    )

    @property
    def depends_on_init_std(self) -> bool:
        return self.free_experts > 0  # the unit of their scores

    @property
    def probs_over_all(self) -> bool:
        return self.aoe_gate == "all"

    @property
    def renormalizes(self) -> bool:
        return not self.probs_over_all
