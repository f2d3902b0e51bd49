"""Systems with a router that dispatch tokens to SwiGLU experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.option import option, with_default
from moe_parallel.config.selection.factorized import UP_INIT_METHODS, aoe_wide_size, up_std
from moe_parallel.config.selection.parts import (
    Balancing,
    BiasBalancing,
    DispatchedSelection,
    DynamicChoices,
    ExpertsChoose,
    FixedChoices,
)
from moe_parallel.config.selection.segments import Segments
from moe_parallel.config.selection.selection import LayerWeights
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class RoutedSelection(DispatchedSelection):
    """The options of every router. The first two are the AoE paper's ablations."""

    moe_router_hidden_size: int | None = option(
        None,
        "hidden size h of a large router with two linear layers d -> h -> n; none: one layer d "
        "-> n",
        weights=True,
        least=1,
    )
    moe_gate_low_rank_size: int | None = option(
        None,
        "ablation of the AoE paper: factorize W_g of each expert as W_down W_up of this rank, and "
        "widen the expert by Eq. 5 to keep the number of parameters; none: W_g is one matrix",
        weights=True,
        least=1,
    )
    moe_gate_up_init_method: str = option(
        "normal",
        "initial W_up of a factorized W_g; see --aoe-up-init-method",
        choices=UP_INIT_METHODS,
    )
    moe_z_loss_coeff: float = option(
        0.0,
        "coefficient of the z-loss, mean(logsumexp(router logits)^2); usually about 1e-3; 0: off",
        least=0,
    )
    moe_input_jitter_eps: float = option(
        0.0,
        "in training, multiply the router's input by uniform noise from [1 - eps, 1 + eps]; 0: off",
        least=0,
        below=1,
    )

    @property
    def up_std(self) -> float | None:
        """The standard deviation of the initial W_up. None: no W_up, or as the other weights."""
        if self.moe_gate_low_rank_size is None:
            return None
        return up_std(self.moe_gate_up_init_method, self.moe_gate_low_rank_size)

    def expert_width(self, hidden_size: int, ffn_hidden_size: int) -> int:
        if self.moe_gate_low_rank_size is None:
            return ffn_hidden_size
        return aoe_wide_size(hidden_size, ffn_hidden_size, self.moe_gate_low_rank_size)

    def layer_weights(self, hidden_size: int, num_experts: int, expert_width: int) -> LayerWeights:
        weights = super().layer_weights(hidden_size, num_experts, expert_width)
        router, rank = self.moe_router_hidden_size, self.moe_gate_low_rank_size
        if router is not None:
            weights = weights._replace(replicated=router * (hidden_size + num_experts))
        if rank is not None:
            weights = weights._replace(
                replicated=weights.replicated + num_experts * hidden_size * rank,
                expert_parallel=num_experts * (rank + 2 * hidden_size) * expert_width,
            )
        return weights

    @property
    def low_rank_sizes(self) -> list[tuple[str, int]]:
        rank = self.moe_gate_low_rank_size
        return [] if rank is None else [("--moe-gate-low-rank-size", rank)]

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        method = self.moe_gate_up_init_method
        if method != "normal" and self.moe_gate_low_rank_size is None:
            raise InputError(
                f"--moe-gate-up-init-method is {method}, but W_g is whole: set "
                "--moe-gate-low-rank-size, or leave it out"
            )


@dataclass(frozen=True)
class TopKSelection(BiasBalancing, Balancing, FixedChoices, RoutedSelection, system="topk"):
    """A linear router selects the K most probable experts (Shazeer 2017; Switch for K = 1)."""

    moe_router_score_function: str = option(
        "softmax",
        "function from router logits to probabilities: softmax, or sigmoid divided by the sum "
        "over the chosen experts (DeepSeek-V3)",
        choices=("softmax", "sigmoid"),
        weights=True,
    )
    moe_router_pre_softmax: bool = option(
        False,
        "weigh the chosen experts by their softmax over all experts, as it is; false: renormalize "
        "it over the chosen ones. Needs softmax scores; with one expert per token it is always so",
        weights=True,
    )
    moe_router_num_groups: int | None = option(
        None, "number of groups that divide the experts; none: no groups", weights=True, least=1
    )
    moe_router_group_topk: int | None = option(
        None,
        "number of groups, those with the highest scores, from which a token may choose experts",
        weights=True,
        least=1,
    )

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if self.moe_router_pre_softmax and self.moe_router_score_function != "softmax":
            raise InputError(
                "--moe-router-pre-softmax is true, but --moe-router-score-function is "
                f"{self.moe_router_score_function}: remove one of them"
            )
        num_groups, topk = self.moe_router_num_groups, self.moe_router_group_topk
        n = config.num_experts
        if (num_groups is None) != (topk is None):
            missing = "--moe-router-group-topk" if topk is None else "--moe-router-num-groups"
            raise InputError(
                f"{missing} is not set: group-limited routing takes --moe-router-num-groups and "
                "--moe-router-group-topk together"
            )
        if num_groups is None or topk is None:
            return
        if n % num_groups:
            raise InputError(
                f"--moe-router-num-groups is {num_groups}, which does not divide --num-experts "
                f"{n}: choose a divisor"
            )
        if topk > num_groups:
            raise InputError(
                f"--moe-router-group-topk is {topk}, above --moe-router-num-groups {num_groups}: "
                f"choose at most {num_groups}"
            )
        left = topk * (n // num_groups)
        if self.moe_router_topk > left:
            raise InputError(
                f"--moe-router-topk is {self.moe_router_topk}, but --moe-router-group-topk {topk} "
                f"of --moe-router-num-groups {num_groups} leaves {left} experts to choose from: "
                "lower it or allow more groups"
            )


@dataclass(frozen=True)
class TopPSelection(DynamicChoices, Balancing, RoutedSelection, system="top_p"):
    """Dynamic routing: the fewest experts whose probabilities sum to p (Huang et al. 2024)."""

    moe_router_load_balancing_type: str = with_default(
        Balancing, "moe_router_load_balancing_type", "seq_aux_loss"
    )


@dataclass(frozen=True)
class ExpertChoiceSelection(ExpertsChoose, RoutedSelection, system="expert_choice"):
    """Each expert takes the tokens with the highest scores for it (Zhou et al. 2022)."""


@dataclass(frozen=True)
class SegmentExpertChoiceSelection(
    ExpertsChoose, Segments, RoutedSelection, system="segment_expert_choice"
):
    """Each expert takes whole segments, by the mean of the previous one (Lory, section 5.3)."""

    # Here it counts segments instead of tokens.
    moe_expert_choice_capacity_factor: float = with_default(
        ExpertsChoose, "moe_expert_choice_capacity_factor", 1.0
    )
    moe_expert_choice_scores: str = with_default(
        ExpertsChoose, "moe_expert_choice_scores", "softmax"
    )

    @property
    def warning(self) -> str:
        return (
            "experts choose among all segments of a micro-batch, later ones too, and the first "
            "segment is judged by its own mean, so the training loss is not the likelihood of the "
            "text; in evaluations each segment chooses its experts: judge by the loss after the "
            "first"
        )
