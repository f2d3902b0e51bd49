"""uoe: some neurons of each expert compute every token, and select the experts. The options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING

from moe_parallel.config.option import option
from moe_parallel.config.selection.balancing import BiasBalancing
from moe_parallel.config.selection.parts import (
    DispatchedSelection,
    FixedChoices,
)
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class UoESelection(BiasBalancing, FixedChoices, DispatchedSelection, system="uoe"):
    """UoE: the K experts whose routing neurons have the largest norms; there is no router."""

    uoe_routing_neurons: int | None = option(
        None,
        "N_s, the neurons of an expert that compute every token; none: the width of an expert / n, "
        "rounded, so that those of all experts together are as wide as one expert",
        weights=True,
        least=1,
    )
    uoe_norm_of: str = option(
        "activation",
        "what the norm is taken of, in the routing neurons of an expert: SiLU(x W_g) * (x W_p) "
        "(activation), SiLU(x W_g) (silu), or x W_g (gate)",
        choices=("activation", "silu", "gate"),
        weights=True,
    )
    uoe_gate_routing: bool = option(
        False,
        "multiply the output of the routing neurons of a chosen expert by its routing probability, "
        "as the output of its other neurons; false: the output of all routing neurons is added as "
        "it is",
        weights=True,
    )

    def routing_neurons(self, expert_width: int, num_experts: int) -> int:
        """N_s of an expert of this width."""
        return self.uoe_routing_neurons or max(1, round(expert_width / num_experts))

    def score_range(self, config: Config) -> float:
        """Eight standard deviations of the initial norms over experts, for tokens of RMS 1.

        A norm is the root of a sum of N_s equally distributed squares. If they are many, its
        standard deviation is that of a square, over twice the root of the mean square.
        """
        std = config.model.init_method_std * math.sqrt(config.model.hidden_size)
        second, fourth = (self._initial_moment(power, std) for power in (2, 4))
        return 8 * math.sqrt((fourth - second**2) / (4 * second))

    def _initial_moment(self, power: int, std: float) -> float:
        """The mean of a power, 2 or 4, of a number of which the norm is taken.

        `std`: the standard deviation of x W_g and x W_p.
        """
        of_normal = {2: std**2, 4: 3 * std**4}[power]
        if self.uoe_norm_of == "gate":
            return of_normal
        gates = (NormalDist(0, std).inv_cdf((place + 0.5) / 1000) for place in range(1000))
        of_silu = fmean((gate / (1 + math.exp(-gate))) ** power for gate in gates)
        return of_silu * of_normal if self.uoe_norm_of == "activation" else of_silu

    def dispatched_width(self, expert_width: int, num_experts: int) -> int:
        return expert_width - self.routing_neurons(expert_width, num_experts)

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        width, n = config.expert_width, config.num_experts
        neurons = self.routing_neurons(width, n)
        if neurons >= width:
            raise InputError(
                f"--uoe-routing-neurons is {neurons} of the {width} neurons of an expert, which "
                "leaves none to select: choose fewer"
            )
        etp, fp8 = config.parallel.expert_tensor_size, config.fp8
        multiple = etp * (1 if fp8.fp8_format is None else fp8.multiple)
        if (width - neurons) % multiple:
            raise InputError(
                f"--uoe-routing-neurons is {neurons}, which leaves {width - neurons} of the "
                f"{width} neurons of an expert, which is not a multiple of {multiple} "
                "(--expert-tensor-parallel-size, times the multiple of --fp8-format): choose "
                "another number"
            )
        if config.moe.moe_use_upcycling or config.moe.moe_dense_warmup_percent:
            raise InputError(
                "--expert-selection uoe does not start from dense layers: equal experts have equal "
                "norms, so the same ones would always be chosen: leave out --moe-use-upcycling and "
                "--moe-dense-warmup-percent"
            )
