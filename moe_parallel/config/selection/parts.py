"""The sets of options that systems of expert selection share; their classes combine these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.forced_routing import FORMS, parse_forced_routing
from moe_parallel.config.option import option
from moe_parallel.config.selection.selection import LayerWeights, Selection
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class DispatchedSelection(Selection):
    """The options of all systems that dispatch tokens to experts."""

    moe_shared_expert_intermediate_size: int | None = option(
        None,
        "total width of the shared expert, a SwiGLU layer that computes every token; m shared "
        "experts of width f are one of width m * f; none: no shared expert",
        weights=True,
        least=1,
    )
    moe_shared_expert_gate: bool = option(
        False,
        "multiply the shared expert's output by sigmoid(x w), one number per token",
        weights=True,
    )
    moe_shared_expert_overlap: bool = option(
        False, "run the shared expert on its own CUDA stream while tokens are dispatched"
    )

    @property
    def sends_c(self) -> bool:
        """Whether C = x W_down is sent with a token to its expert."""
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
    """Auxiliary losses that balance the load."""

    moe_aux_loss_coeff: float = option(
        0.01,
        "coefficient alpha of the load-balancing loss, alpha * n * sum f_i P_i, with f_i the share "
        "of tokens that chose expert i and P_i its mean probability; 0: off",
        least=0,
    )
    moe_router_load_balancing_type: str = option(
        "aux_loss",
        "scope of f and P in the load-balancing loss: a micro-batch (aux_loss), each sequence "
        "(seq_aux_loss), or f over the previous global batch (global_aux_loss)",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss"),
    )
    moe_importance_loss_coeff: float = option(
        0.0,
        "coefficient of the importance loss, (std / mean)^2 over the experts of their summed "
        "routing probabilities; 0: off",
        least=0,
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
    """Load balance without a loss (Wang et al. 2024): a bias for the selection only."""

    moe_router_enable_expert_bias: bool = option(
        False,
        "balance the load without a loss: add a bias to the probabilities (AoE: to the norms) for "
        "the selection only; after each step it rises for experts chosen less than the mean and "
        "falls for the others",
        weights=True,
    )
    moe_router_bias_update: str = option(
        "sign",
        "how the bias moves after a step: by the rate, up or down (sign); by the rate times the "
        "relative error of the load (error), and its growth (id); or to the values that would have "
        "balanced the step (quantile)",
        choices=("sign", "error", "id", "quantile"),
    )
    moe_router_bias_update_rate: float = option(
        1e-3, "change of the balancing bias per step; quantile has none", above=0
    )
    moe_router_bias_ema: float = option(
        0.0, "share of the bias that a quantile update keeps", least=0, below=1
    )

    @property
    def uses_step_load(self) -> bool:
        return self.moe_router_enable_expert_bias or super().uses_step_load

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        update = self.moe_router_bias_update
        if update != "sign" and not self.moe_router_enable_expert_bias:
            raise InputError(
                f"--moe-router-bias-update is {update}, but there is no bias: set "
                "--moe-router-enable-expert-bias"
            )
        if update != "quantile":
            if self.moe_router_bias_ema:
                raise InputError(
                    f"--moe-router-bias-ema is {self.moe_router_bias_ema}, but "
                    f"--moe-router-bias-update is {update}: set it to quantile, or remove the EMA"
                )
            return
        if self.choices_per_token == config.num_experts:
            raise InputError(
                "--moe-router-bias-update is quantile, but every token takes all "
                f"{config.num_experts} experts: lower --moe-router-topk"
            )
        if getattr(self, "moe_router_num_groups", None) is not None:
            raise InputError(
                "--moe-router-bias-update is quantile, which knows of no groups: use sign, error "
                "or id, or leave out --moe-router-num-groups"
            )


@dataclass(frozen=True)
class TokensChoose(Selection):
    """Each token chooses its experts, so a benchmark can choose others for it."""

    moe_router_force_routing: str | None = option(
        None,
        "for benchmarks: which experts compute a token, whatever its scores; probabilities come "
        f"from the scores. {FORMS}; without a number hot is 0.5, zipf 1, warmup 100. none: off",
    )

    @property
    def forced_routing(self) -> str | None:
        return self.moe_router_force_routing or super().forced_routing

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if self.moe_router_force_routing is not None:
            parse_forced_routing(self.moe_router_force_routing)


@dataclass(frozen=True)
class FixedChoices(TokensChoose):
    """A fixed number of experts per token."""

    moe_router_topk: int = option(2, "number of experts per token (K)", weights=True, least=1)
    moe_aux_loss_per_choice: bool = option(
        False,
        "divide the load-balancing loss by (MoE layers * K), so that uniform routing gives alpha",
    )
    moe_router_force_load_balancing: bool = option(
        False, "for benchmarks: choose the experts in turn, whatever the scores"
    )

    @property
    def choices_per_token(self) -> int:
        return self.moe_router_topk

    @property
    def forced_routing(self) -> str | None:
        return "in turn" if self.moe_router_force_load_balancing else super().forced_routing

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        n = config.num_experts
        if self.moe_router_topk > n:
            raise InputError(
                f"--moe-router-topk is {self.moe_router_topk}, above --num-experts {n}: choose at "
                f"most {n}"
            )
        if self.moe_router_force_load_balancing and self.moe_router_force_routing is not None:
            raise InputError(
                "--moe-router-force-load-balancing chooses the experts in turn, and "
                f"--moe-router-force-routing {self.moe_router_force_routing} otherwise: remove one "
                "of them"
            )


@dataclass(frozen=True)
class DynamicChoices(TokensChoose):
    """Top-p: the fewest experts whose probabilities sum to p (Huang et al. 2024)."""

    moe_top_p: float = option(
        0.4,
        "p: a token takes its most probable experts until their probabilities sum to p",
        above=0,
        most=1,
    )
    moe_top_p_strict: bool = option(
        False,
        "stop when the sum exceeds p (the authors' code) instead of when it reaches p (the paper)",
    )
    moe_inference_top_p: float | None = option(
        None, "p in evaluation; none: --moe-top-p", above=0, most=1
    )
    moe_inference_max_experts: int | None = option(
        None, "maximum number of experts per token in evaluation; none: no limit", least=1
    )
    moe_entropy_loss_coeff: float = option(
        1e-4,
        "coefficient of the dynamic loss, the mean entropy of the routing probabilities; 0: off",
        least=0,
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
    """Experts choose among all tokens of the micro-batch, also later ones (Zhou et al. 2022)."""

    moe_expert_choice_capacity_factor: float = option(
        2.0, "each expert takes round(factor * tokens / n) tokens", above=0
    )
    moe_expert_choice_scores: str = option(
        "raw",
        "scores by which experts rank tokens and weight their outputs: raw, or softmax over "
        "experts",
        choices=("raw", "softmax"),
    )

    @property
    def mean_choices(self) -> float:
        return self.moe_expert_choice_capacity_factor

    @property
    def warning(self) -> str:
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
