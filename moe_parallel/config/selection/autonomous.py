"""Systems without a router: Autonomy-of-Experts, which ranks experts by the norm of x W_down."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NoReturn

from moe_parallel.config.message import flag
from moe_parallel.config.option import option, with_default
from moe_parallel.config.selection.balancing import Balancing, BiasBalancing
from moe_parallel.config.selection.factorized import UP_INIT_METHODS, aoe_wide_size, up_std
from moe_parallel.config.selection.free_experts import FixedFreeExperts
from moe_parallel.config.selection.kept import OwnWeight, Scoring
from moe_parallel.config.selection.parts import (
    DispatchedSelection,
    DynamicChoices,
    ExpertsChoose,
    FixedChoices,
)
from moe_parallel.config.selection.selection import LayerWeights, ProductWeights
from moe_parallel.config.selection.threshold import Cutoffs, exceeded_norm
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class AutonomousSelection(DispatchedSelection):
    """The experts of AoE: E(x) = (SiLU(x W_down W_up) * (x W_p)) W_o."""

    width_flag: ClassVar[str] = "--aoe-wide-size"

    aoe_low_rank_size: int = option(
        64, "d_low, the rank of W_g = W_down W_up", weights=True, least=1
    )
    aoe_wide_size: int | None = option(
        None,
        "d_wide, the width of an expert; none: Eq. 5 of the AoE paper, which gives an expert "
        "as many parameters as a SwiGLU expert of --moe-ffn-hidden-size",
        least=1,
    )
    aoe_up_init_method: str = option(
        "normal",
        "initial W_up: N(0, s^2) with s = --init-method-std like all weights (normal), or N(0, "
        "1 / d_low), so that x W_down W_up starts as large as x W_g in a SwiGLU expert "
        "(scaled). The norms, and with them the selection, start the same",
        choices=UP_INIT_METHODS,
    )
    aoe_gradient: str = option(
        "full",
        "full: the gradient passes through the norms of all experts. selected: only through those "
        "of the chosen experts, which is cheaper; refused if an auxiliary loss or a softmax over "
        "all norms needs the others. selected_despite_aux: as selected, without that part of the "
        "gradient",
        choices=("full", "selected", "selected_despite_aux"),
    )

    aoe_recompute_scores: bool = option(
        True,
        "in the backward pass of the norms, recompute C = x W_down; without --aoe-gradient full, "
        "only if it was not kept for the chosen experts. false: with --aoe-gradient full, keep C "
        "of all experts, n d_low values per token, which is faster",
    )
    aoe_recompute_gate: bool = option(
        True,
        "in the backward pass, recompute C W_up; false: keep it, K d_wide values per token",
    )
    aoe_send_activations: bool = option(
        False,
        "send C = x W_down with each token to other ranks instead of recomputing it there; "
        "adds d_low / d to the traffic, so it pays only if the link is faster than the product. "
        "Only with --expert-selection aoe",
    )
    aoe_gather_w_down: bool = option(
        False,
        "each rank holds W_down of its own experts only and gathers the others in each layer, "
        "forward and backward; false: every rank holds W_down of all experts",
    )

    @property
    def up_std(self) -> float | None:
        """The standard deviation of the initial W_up. None: that of the other weights."""
        return up_std(self.aoe_up_init_method, self.aoe_low_rank_size)

    def expert_width(self, hidden_size: int, ffn_hidden_size: int) -> int:
        """The inner width of an expert, d_wide."""
        return self.aoe_wide_size or aoe_wide_size(
            hidden_size, ffn_hidden_size, self.aoe_low_rank_size
        )

    def fitting_width(self, hidden_size: int, ffn_hidden_size: int, multiple: int) -> str:
        width = self.expert_width(hidden_size, ffn_hidden_size)
        return f"{self.width_flag} {max(width - width % multiple, multiple)}"

    def own_weights(self, hidden_size: int, num_experts: int, expert_width: int) -> list[OwnWeight]:
        own = [OwnWeight("w_free", self.free_experts)] if self.free_experts else []
        w_down = num_experts * hidden_size * self.aoe_low_rank_size
        own.append(OwnWeight("w_down", w_down, gathered=self.aoe_gather_w_down))
        return own + super().own_weights(hidden_size, num_experts, expert_width)

    def layer_weights(self, hidden_size: int, num_experts: int, expert_width: int) -> LayerWeights:
        rank = self.aoe_low_rank_size
        down = num_experts * hidden_size * rank
        expert = num_experts * (rank + 2 * hidden_size) * expert_width
        replicated, expert = (0, expert + down) if self.aoe_gather_w_down else (down, expert)
        weights = super().layer_weights(hidden_size, num_experts, expert_width)
        return weights._replace(replicated=replicated, expert_parallel=expert)

    def product_weights(
        self, hidden_size: int, num_experts: int, expert_width: int
    ) -> ProductWeights:
        """W_down of all experts computes the scores, whichever rank holds it."""
        scores, experts = super().product_weights(hidden_size, num_experts, expert_width)
        gathered = self.aoe_gather_w_down * num_experts * hidden_size * self.aoe_low_rank_size
        return ProductWeights(scores + gathered, experts - gathered)

    def planned_scores(self, config: Config) -> Scoring:
        greatest = self.chooses_greatest
        return Scoring(
            self.aoe_low_rank_size,
            self.aoe_gather_w_down,
            self.aoe_send_activations and greatest,
            self.aoe_recompute_scores,
            self.aoe_recompute_gate,
            self.aoe_gradient == "full",
            joins_norms=self.may_join_norms(
                fp8=config.fp8.fp8_format is not None,
                capacity=config.moe.moe_expert_capacity_factor is not None,
            ),
            passes_on_c=greatest,
        )

    @property
    def chooses_greatest(self) -> bool:
        """Whether the K greatest norms are chosen where they are computed, and C with them."""
        by_norms = self.forced_routing is None and not self.free_experts
        return by_norms and self.choices_per_token is not None

    def may_join_norms(self, *, fp8: bool, capacity: bool) -> bool:
        """Whether experts on the token's rank can differentiate the norms of their rows, too.

        The norms then have no other gradient, so no loss may need one. A choice that a capacity
        dropped has a norm but no row, and experts in FP8 do not do it.

        Args:
            fp8: whether the experts compute in FP8.
            capacity: whether each accepts a limited number of rows.
        """
        exact = self.aoe_gradient == "selected" and not self.probs_over_all
        return exact and self.chooses_greatest and not (fp8 or capacity)

    def weights_per_score(self, hidden_size: int) -> int:
        """A free expert has no norm: its score is a number of its own."""
        return 1

    @property
    def low_rank_sizes(self) -> list[tuple[str, int]]:
        return [("--aoe-low-rank-size", self.aoe_low_rank_size)]

    def score_range(self, config: Config) -> float:
        """Eight standard deviations of the initial norms over experts, each s sqrt(d / 2)."""
        return 8 * config.model.init_method_std * math.sqrt(config.model.hidden_size / 2)

    @property
    def sends_c(self) -> bool:
        return self.aoe_send_activations

    @property
    def probs_over_all(self) -> bool:
        """Whether the probs are a softmax over the norms of all experts."""
        return False

    @property
    def screening(self) -> int:
        """M > 0: the K + M largest norms in FP8 are the candidates of a token; 0: off."""
        return 0

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        etp, width = config.parallel.expert_tensor_size, config.model.hidden_size
        if self.aoe_gather_w_down and width % etp:
            raise InputError(
                f"--aoe-gather-w-down cuts W_down along --hidden-size {width}, which "
                f"--expert-tensor-parallel-size {etp} does not divide: choose a multiple of {etp}, "
                "or leave it out"
            )
        if self.aoe_send_activations and self.choices_per_token is None:
            raise InputError(
                f"--aoe-send-activations is true, but --expert-selection {self.system} does not "
                "pass C on with its choices: leave it out"
            )
        if self.aoe_gradient == "selected":
            self._check_selected_gradient()

    def _check_selected_gradient(self) -> None:
        reasons = [f"{flag(name)} {getattr(self, name)}" for name in self.losses_of_all_scores]
        if self.probs_over_all:
            reasons.append("probs that are a softmax over all norms")
        if reasons:
            self.refuse_selected_gradient(reasons[-1])

    @staticmethod
    def refuse_selected_gradient(reason: str) -> NoReturn:
        """`reason`: what needs the gradient of the other norms."""
        raise InputError(
            f"--aoe-gradient is selected, but {reason} has a gradient through the norms of "
            "experts that are not selected: use full, or selected_despite_aux to drop that part"
        )


@dataclass(frozen=True)
class AoESelection(
    FixedFreeExperts, BiasBalancing, Balancing, FixedChoices, AutonomousSelection, system="aoe"
):
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


@dataclass(frozen=True)
class AoETopPSelection(DynamicChoices, Balancing, AutonomousSelection, system="aoe_top_p"):
    """AoE with top-p: the fewest experts whose softmax of norms sums to p."""

    moe_top_p: float = with_default(DynamicChoices, "moe_top_p", 0.6)

    @property
    def probs_over_all(self) -> bool:
        return True


@dataclass(frozen=True)
class AoEThresholdSelection(Cutoffs, AutonomousSelection, system="aoe_threshold"):
    """AoE with expert thresholds: each expert takes the tokens whose norm exceeds its cutoff."""

    aoe_threshold_gate: str = option(
        "softmax",
        "routing probabilities: softmax over the norms of all experts, not renormalized (softmax), "
        "or the sigmoid of the norm minus the cutoff (sigmoid)",
        choices=("softmax", "sigmoid"),
        weights=True,
    )

    @property
    def probs_over_all(self) -> bool:
        return self.aoe_threshold_gate == "softmax"

    def first_cutoff(self, hidden_size: int, num_experts: int, init_std: float) -> float:
        std = init_std * math.sqrt(hidden_size)
        return exceeded_norm(self.mean_choices / num_experts, std, self.aoe_low_rank_size)


@dataclass(frozen=True)
class AoEExpertChoiceSelection(ExpertsChoose, AutonomousSelection, system="aoe_expert_choice"):
    """AoE with expert choice: each expert takes the tokens with the largest norms."""

    @property
    def probs_over_all(self) -> bool:
        return self.moe_expert_choice_scores == "softmax"
