"""What systems of expert selection share: sets of options that their classes combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.option import option
from moe_parallel.config.selection.selection import LayerWeights, Selection
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class DispatchedSelection(Selection):
    """Tokens travel to experts: what the systems that do so can all have."""

    moe_shared_expert_intermediate_size: int | None = option(
        None,
        "width of a SwiGLU layer that computes every token beside the chosen experts, in all: m "
        "shared experts of width f are one of width m * f; none: no shared expert",
        weights=True,
        least=1,
    )
    moe_shared_expert_gate: bool = option(
        False, "weigh the shared expert's output by sigmoid(x w), one number a token", weights=True
    )
    moe_shared_expert_overlap: bool = option(
        False, "compute the shared expert on a CUDA stream of its own while tokens travel"
    )

    @property
    def sends_c(self) -> bool:
        """Whether C = x W_down travels with a token to its expert."""
        return False

    def layer_weights(self, hidden_size: int, num_experts: int, expert_width: int) -> LayerWeights:
        weights = super().layer_weights(hidden_size, num_experts, expert_width)
        width = self.moe_shared_expert_intermediate_size or 0
        return weights._replace(tensor_parallel=3 * hidden_size * width)

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        width = self.moe_shared_expert_intermediate_size
        if width is None:
            self._check_no_shared_expert()
            return
        n = config.num_experts
        limit = n * (config.moe.moe_ffn_hidden_size or config.model.ffn_hidden_size)
        if width > limit:
            raise InputError(
                f"--moe-shared-expert-intermediate-size is {width}, more than the {limit} of all "
                f"{n} experts together: shared experts must not outnumber them"
            )
        tp = config.parallel.tensor_model_parallel_size
        if width % tp:
            raise InputError(
                f"--moe-shared-expert-intermediate-size is {width}, which "
                f"--tensor-model-parallel-size {tp} does not divide: choose a multiple of {tp}"
            )

    def _check_no_shared_expert(self) -> None:
        for name in ("gate", "overlap"):
            if getattr(self, f"moe_shared_expert_{name}"):
                raise InputError(
                    f"--moe-shared-expert-{name} is true, but there is no shared expert: set "
                    "--moe-shared-expert-intermediate-size"
                )


@dataclass(frozen=True)
class Balancing(Selection):
    """Losses and a bias that spread the load."""

    moe_aux_loss_coeff: float = option(
        0.01, "weight alpha of the load-balancing loss alpha * n * sum f_i P_i; 0: off", least=0
    )
    moe_router_load_balancing_type: str = option(
        "aux_loss",
        "over what f and P of the load-balancing loss are taken: a micro-batch (aux_loss), each "
        "sequence (seq_aux_loss), or f over the global batch before (global_aux_loss)",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss"),
    )
    moe_importance_loss_coeff: float = option(
        0.0, "weight of (std / mean)^2 of the sums of gates over the experts; 0: off", least=0
    )

    @property
    def by_sequence(self) -> bool:
        return self.moe_router_load_balancing_type == "seq_aux_loss" or super().by_sequence

    @property
    def uses_step_load(self) -> bool:
        of_the_step_before = self.moe_router_load_balancing_type == "global_aux_loss"
        return (of_the_step_before and self.moe_aux_loss_coeff != 0) or super().uses_step_load


@dataclass(frozen=True)
class BiasBalancing(Selection):
    """Load balance without a loss (Wang et al. 2024): a bias that only selects, never weighs."""

    moe_router_enable_expert_bias: bool = option(
        False,
        "add a bias to the scores that experts are selected by, raised after a step for experts "
        "chosen less than the mean, lowered for the others",
        weights=True,
    )
    moe_router_bias_update_rate: float = option(1e-3, "by how much a step moves that bias", above=0)

    @property
    def uses_step_load(self) -> bool:
        return self.moe_router_enable_expert_bias or super().uses_step_load

    @property
    def bias_update_rate(self) -> float | None:
        return self.moe_router_bias_update_rate if self.moe_router_enable_expert_bias else None


@dataclass(frozen=True)
class FixedChoices(Selection):
    """A fixed number of experts per token."""

    moe_router_topk: int = option(2, "experts per token (K)", weights=True, least=1)
    moe_aux_loss_per_choice: bool = option(
        False, "divide the load-balancing loss by MoE layers * K: alpha, where routing is uniform"
    )
    moe_router_force_load_balancing: bool = option(
        False, "for benchmarks: choose experts in turn, whatever the scores"
    )

    @property
    def choices_per_token(self) -> int:
        return self.moe_router_topk

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        n = config.num_experts
        if self.moe_router_topk > n:
            raise InputError(
                f"--moe-router-topk is {self.moe_router_topk}, above --num-experts {n}: choose at "
                f"most {n}"
            )


@dataclass(frozen=True)
class DynamicChoices(Selection):
    """Top-P: the fewest experts whose probabilities sum to p (Huang et al. 2024)."""

    moe_top_p: float = option(
        0.4, "probability p that the chosen experts together reach", above=0, most=1
    )
    moe_top_p_strict: bool = option(
        False, "stop above p (the authors' code), not at p or above (the paper)"
    )
    moe_inference_top_p: float | None = option(
        None, "p in evaluations; none: --moe-top-p", above=0, most=1
    )
    moe_inference_max_experts: int | None = option(
        None, "most experts per token in evaluations; none: no limit", least=1
    )
    moe_entropy_loss_coeff: float = option(
        1e-4, "weight of the dynamic loss, the mean entropy of the probabilities; 0: off", least=0
    )

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        most, n = self.moe_inference_max_experts, config.num_experts
        if most is not None and most > n:
            raise InputError(
                f"--moe-inference-max-experts is {most}, above --num-experts {n}: choose at most "
                f"{n}, or none"
            )


@dataclass(frozen=True)
class ExpertsChoose(Selection):
    """Experts choose tokens (Zhou et al. 2022). Each sees the whole micro-batch, the future too."""

    moe_expert_choice_capacity_factor: float = option(
        2.0, "each expert takes round(factor * tokens / n) tokens", above=0
    )
    moe_expert_choice_scores: str = option(
        "raw",
        "what experts rank tokens by and weigh them with: raw scores, or their softmax",
        choices=("raw", "softmax"),
    )

    @property
    def mean_choices(self) -> float:
        return self.moe_expert_choice_capacity_factor

    @property
    def caution(self) -> str:
        return (
            "experts choose among all tokens of a micro-batch, later ones too, so the training "
            "loss is not the likelihood of the text; in evaluations each token chooses its experts"
        )

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        factor, n = self.moe_expert_choice_capacity_factor, config.num_experts
        if factor > n:
            raise InputError(
                f"--moe-expert-choice-capacity-factor is {factor}, above --num-experts {n}: at {n} "
                "every expert takes every token already"
            )
