"""Systems without a router: Autonomy-of-Experts, which ranks experts by the norm of x W_down."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NoReturn

from moe_parallel.config.message import flag
from moe_parallel.config.option import option
from moe_parallel.config.selection.parts import DispatchedSelection
from moe_parallel.config.selection.routed import UP_INIT_METHODS, aoe_wide_size, up_std
from moe_parallel.config.selection.selection import LayerWeights, ProductWeights
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
