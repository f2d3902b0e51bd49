"""Systems with a router that dispatch tokens to SwiGLU experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.message import flag
from moe_parallel.config.option import option, with_default
from moe_parallel.config.selection.balancing import Balancing, BiasBalancing
from moe_parallel.config.selection.factorized import UP_INIT_METHODS, aoe_wide_size, up_std
from moe_parallel.config.selection.free_experts import FixedFreeExperts, FreeExperts
from moe_parallel.config.selection.kept import (
    EXPERTS,
    LOSS,
    PROBS,
    SCORES,
    KeptTensor,
    OwnWeight,
)
from moe_parallel.config.selection.parts import (
    DispatchedSelection,
    DynamicChoices,
    ExpertsChoose,
    FixedChoices,
    FixedNumber,
)
from moe_parallel.config.selection.segments import Segments
from moe_parallel.config.selection.selection import LayerWeights, ProductWeights
from moe_parallel.config.selection.threshold import Cutoffs, exceeded_normal
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
    moe_erc_loss_coeff: float = option(
        0.0,
        "coefficient of the expert-router coupling loss. It takes each row of the router as an "
        "input of all experts: its own expert should respond to it most, and should respond less "
        "to the other rows; 1 in the paper; 0: off",
        least=0,
    )
    moe_erc_alpha: float = option(
        1.0,
        "alpha of the coupling loss: another expert may respond to a row at most alpha times as "
        "strongly as its own expert does (norm of x W_g); with a smaller alpha experts specialize "
        "more",
        least=0,
        most=1,
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

    def weights_per_score(self, hidden_size: int) -> int:
        return self.moe_router_hidden_size or hidden_size

    def expert_width(self, hidden_size: int, ffn_hidden_size: int) -> int:
        if self.moe_gate_low_rank_size is None:
            return ffn_hidden_size
        return aoe_wide_size(hidden_size, ffn_hidden_size, self.moe_gate_low_rank_size)

    def own_weights(self, hidden_size: int, num_experts: int, expert_width: int) -> list[OwnWeight]:
        scores, h = num_experts + self.free_experts, self.moe_router_hidden_size
        sizes = [scores * hidden_size] if h is None else [h * hidden_size, scores * h]
        own = [OwnWeight("w_router", size, in_fp32=True) for size in sizes]
        if self.moe_gate_low_rank_size is not None:
            w_down = num_experts * hidden_size * self.moe_gate_low_rank_size
            own.append(OwnWeight("w_down", w_down))
        return own + super().own_weights(hidden_size, num_experts, expert_width)

    def kept_by_losses(self) -> list[KeptTensor]:
        kept = super().kept_by_losses()
        if self.moe_z_loss_coeff:
            kept += [SCORES, KeptTensor("logsumexp of the scores", token=4), LOSS]
        if self.moe_erc_loss_coeff:
            kept.append(LOSS)
        return kept

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

    def product_weights(
        self, hidden_size: int, num_experts: int, expert_width: int
    ) -> ProductWeights:
        """The first factor of W_g, which every rank holds, is a part of the experts."""
        scores, experts = super().product_weights(hidden_size, num_experts, expert_width)
        w_down = num_experts * hidden_size * (self.moe_gate_low_rank_size or 0)
        return ProductWeights(scores - w_down, experts + w_down)

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
        self._check_coupling(config.num_experts)

    def _check_coupling(self, num_experts: int) -> None:
        coefficient, alpha = self.moe_erc_loss_coeff, self.moe_erc_alpha
        if not coefficient:
            if alpha != RoutedSelection.moe_erc_alpha:
                raise InputError(
                    f"--moe-erc-alpha is {alpha}, but there is no coupling loss: set "
                    "--moe-erc-loss-coeff, or leave it out"
                )
            return
        for name in ("moe_router_hidden_size", "moe_gate_low_rank_size"):
            if getattr(self, name) is not None:
                raise InputError(
                    f"--moe-erc-loss-coeff is {coefficient}, which needs one matrix for the router "
                    f"and one W_g for an expert: leave out {flag(name)}"
                )
        if num_experts == 1:
            raise InputError(
                f"--moe-erc-loss-coeff is {coefficient}, which compares experts, and --num-experts "
                "is 1: raise it, or leave the loss out"
            )


@dataclass(frozen=True)
class TopKSelection(
    FixedFreeExperts, BiasBalancing, Balancing, FixedChoices, RoutedSelection, system="topk"
):
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
        "weight the chosen experts by their softmax over all experts, as it is; false: renormalize "
        "it over the chosen ones. Needs softmax scores. With one expert per token it is always on",
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

    @property
    def renormalizes(self) -> bool:
        return self.moe_router_topk > 1 and not self.moe_router_pre_softmax

    def kept_by_rule(self) -> list[KeptTensor] | None:
        if self.moe_router_score_function == "softmax":
            return super().kept_by_rule()
        return self._without_zero_experts([SCORES, EXPERTS, PROBS, *self._logarithms()])

    def _logarithms(self) -> list[KeptTensor]:
        """What the logarithms of the sigmoids of several choices keep."""
        if self.moe_router_topk == 1:
            return []
        return [
            KeptTensor("scores of the choices", slot=4),
            KeptTensor("exponentials of the scores of the choices", slot=4),
        ]

    def kept_by_losses(self) -> list[KeptTensor]:
        kept = super().kept_by_losses()
        if self.moe_router_score_function == "sigmoid" and self.moe_aux_loss_coeff:
            kept += [SCORES, KeptTensor("exponentials of the scores", score=4)]
        return kept

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
class TopPSelection(FreeExperts, DynamicChoices, Balancing, RoutedSelection, system="top_p"):
    """Dynamic routing: the fewest experts whose probabilities sum to p (Huang et al. 2024)."""

    moe_router_load_balancing_type: str = with_default(
        Balancing, "moe_router_load_balancing_type", "seq_aux_loss"
    )


@dataclass(frozen=True)
class ThresholdSelection(Cutoffs, RoutedSelection, system="threshold"):
    """Each expert takes the tokens whose score exceeds its own cutoff (Sun et al. 2026)."""

    def first_cutoff(self, hidden_size: int, num_experts: int, init_std: float) -> float:
        std = self._initial_std(hidden_size, init_std)
        return exceeded_normal(self.mean_choices / num_experts, std)

    def score_range(self, config: Config) -> float:
        """Eight standard deviations of the initial logits."""
        return 8 * self._initial_std(config.model.hidden_size, config.model.init_method_std)

    def _initial_std(self, hidden_size: int, init_std: float) -> float:
        """The standard deviation of the initial logits, for tokens of RMS 1."""
        std = init_std * math.sqrt(hidden_size)
        if self.moe_router_hidden_size is not None:
            std *= init_std * math.sqrt(self.moe_router_hidden_size)
        return std

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if self.moe_z_loss_coeff:
            raise InputError(
                f"--moe-z-loss-coeff is {self.moe_z_loss_coeff}, but --expert-selection threshold "
                "has no softmax whose logits it could bound: leave it out"
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

    def kept_by_rule(self) -> None:
        return None

    @property
    def warning(self) -> str:
        return (
            "experts choose among all segments of a micro-batch, later ones too, and the first "
            "segment is judged by its own mean, so the training loss is not the likelihood of the "
            "text; in evaluations each segment chooses its experts: judge by the loss after the "
            "first"
        )


@dataclass(frozen=True)
class HashSelection(FixedNumber, RoutedSelection, system="hash"):
    """A frozen table gives each token id K experts, and a router weights them: a control."""

    @property
    def renormalizes(self) -> bool:
        return self.moe_router_topk > 1

    def state_bytes(self, num_experts: int, vocabulary: int) -> int:
        table = 8 * vocabulary * self.moe_router_topk
        return super().state_bytes(num_experts, vocabulary) + table

    @property
    def reads_token_ids(self) -> bool:
        return True
