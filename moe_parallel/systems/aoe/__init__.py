"""aoe: the K experts with the largest norm ||x W_down|| (Autonomy-of-Experts). The options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.option import option, with_default
from moe_parallel.config.selection.balancing import BiasBalancing
from moe_parallel.config.selection.kinds import AutonomousSelection
from moe_parallel.config.selection.parts import TopKChoices
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


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
    aoe_fp8_screening: int = option(
        0,
        "compute the norms of all experts in FP8 and only those of the best K + M candidates "
        "exactly; the exact norms select. --aoe-gradient must not be full; 0: off",
        least=0,
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

    @property
    def screening(self) -> int:
        return self.aoe_fp8_screening

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if self.aoe_fp8_screening == 0:
            return
        chosen = f"--aoe-fp8-screening is {self.aoe_fp8_screening}"
        if self.aoe_gradient == "full":
            raise InputError(
                f"{chosen}, but --aoe-gradient full goes through all norms, and those in FP8 have "
                "no gradient: set --aoe-gradient selected, or selected_despite_aux"
            )
        if self.aoe_gate == "all":
            raise InputError(
                f"{chosen}, but --aoe-gate all weights by all norms, most of which would be "
                "rounded to FP8: set --aoe-gate selected"
            )
        if self.forced_routing is not None:
            forcing = "load-balancing" if self.moe_router_force_load_balancing else "routing"
            raise InputError(
                f"{chosen}, but --moe-router-force-{forcing} chooses without norms: remove one of "
                "them"
            )
        if self.moe_router_replay is not None:
            raise InputError(
                f"{chosen}, but --moe-router-replay chooses without norms: remove one of them"
            )
        most = config.num_experts - self.moe_router_topk - 1
        if self.aoe_fp8_screening > most:
            raise InputError(
                f"{chosen}, which with --moe-router-topk {self.moe_router_topk} leaves none of "
                f"--num-experts {config.num_experts} out: choose at most {max(most, 0)}"
            )
