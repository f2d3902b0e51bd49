"""The sets of options that systems of expert selection share; their classes combine these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.forced_routing import FORMS, parse_forced_routing
from moe_parallel.config.message import flag
from moe_parallel.config.option import option
from moe_parallel.config.selection.kept import (
    EXPERTS,
    LOSS,
    PROBABILITIES,
    PROBS,
    SCORES,
    KeptTensor,
    Target,
)
from moe_parallel.config.selection.selection import (
    LayerWeights,
    Selection,
    SharedExpertSize,
    check_at_most_all,
)
from moe_parallel.config.selection.time_constant import TimeConstant
from moe_parallel.config.selection.traced import TracedSelection
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class DispatchedSelection(TracedSelection):
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
    def shared_expert(self) -> SharedExpertSize | None:
        width = self.moe_shared_expert_intermediate_size
        return None if width is None else SharedExpertSize(width, self.moe_shared_expert_gate)

    @property
    def sends_c(self) -> bool:
        """Whether C = x W_down is sent with a token to its expert."""
        return False

    def weights_per_score(self, hidden_size: int) -> int:
        """The number of weights that score one expert, where its own matrices do not."""
        return hidden_size

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
class TokensChoose(Selection):
    """Each token chooses its experts, so a benchmark can choose others for it."""

    moe_router_force_routing: str | None = option(
        None,
        "for benchmarks: the load of the experts, whatever the scores are; probabilities come from "
        f"the scores. {FORMS}; without a number hot is 0.5, zipf 1, warmup 100. none: off",
    )

    @property
    def forced_routing(self) -> str | None:
        return self.moe_router_force_routing or super().forced_routing

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if self.moe_router_force_routing is not None:
            parse_forced_routing(self.moe_router_force_routing)


@dataclass(frozen=True)
class FixedNumber(Selection):
    """A fixed number of experts per token."""

    moe_router_topk: int = option(
        2,
        "number of experts per token (K), in Hugging Face's models num_experts_per_tok",
        weights=True,
        least=1,
    )

    @property
    def choices_per_token(self) -> int:
        return self.moe_router_topk

    @property
    def renormalizes(self) -> bool:
        return True

    def kept_by_rule(self) -> list[KeptTensor] | None:
        return [SCORES, EXPERTS, PROBS] if self.renormalizes else [PROBABILITIES, EXPERTS]

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        check_at_most_all(self, "moe_router_topk", config)


@dataclass(frozen=True)
class FixedChoices(FixedNumber, TokensChoose):
    """A token chooses a fixed number of experts."""

    moe_aux_loss_per_choice: bool = option(
        False,
        "divide the load-balancing loss by (MoE layers * K), so that uniform routing gives alpha",
    )
    moe_router_force_load_balancing: bool = option(
        False, "for benchmarks: choose the experts in turn, whatever the scores"
    )

    @property
    def forced_routing(self) -> str | None:
        return "in turn" if self.moe_router_force_load_balancing else super().forced_routing

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if self.moe_router_force_load_balancing and self.moe_router_force_routing is not None:
            raise InputError(
                "--moe-router-force-load-balancing chooses the experts in turn, and "
                f"--moe-router-force-routing {self.moe_router_force_routing} differently: remove "
                "one of them"
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
    moe_top_p_renormalize: bool = option(
        False,
        "divide the probabilities of the chosen experts by their sum (DTop-p); false: weight by "
        "the probabilities as they are (Huang et al.)",
        weights=True,
    )
    moe_inference_top_p: float | None = option(
        None, "p in evaluation; none: --moe-top-p", above=0, most=1
    )
    moe_inference_max_experts: int | None = option(
        None, "maximum number of experts per token in evaluation; none: no limit", least=1
    )
    moe_top_p_target_experts: float | None = option(
        None,
        "move p after each step so that tokens have this number of experts (K) on average over all "
        "layers; --moe-top-p is then the p of the first step. none: p is fixed",
        state=True,
        least=1,
    )
    moe_top_p_proportional_gain: float = option(
        0.5, "how much p follows the error (K - mean number) / n of the latest step", least=0
    )
    moe_top_p_integral_gain: float = option(
        0.2, "how much p follows the sum of the errors of all steps", above=0
    )
    moe_entropy_loss_coeff: float = option(
        1e-4,
        "coefficient of the dynamic loss, the mean entropy of the routing probabilities; 0: off",
        least=0,
    )

    @property
    def mean_choices(self) -> float | None:
        return self.moe_top_p_target_experts

    @property
    def renormalizes(self) -> bool:
        return self.moe_top_p_renormalize

    @property
    def controlled(self) -> str | None:
        return None if self.moe_top_p_target_experts is None else "top_p"

    def target_choices(self, num_experts: int) -> Target | None:
        k = self.moe_top_p_target_experts
        return None if k is None else Target("--moe-top-p-target-experts", k)

    def kept_by_rule(self) -> list[KeptTensor]:
        kept = [PROBABILITIES, EXPERTS]
        if self.moe_top_p_renormalize:
            kept += [
                KeptTensor("empty slots", slot=1),
                KeptTensor("probs before division", slot=4),
                KeptTensor("sums of the probs", token=4),
            ]
        return kept

    @property
    def losses_of_all_scores(self) -> list[str]:
        own = ["moe_entropy_loss_coeff"] if self.moe_entropy_loss_coeff else []
        return super().losses_of_all_scores + own

    def kept_by_losses(self) -> list[KeptTensor]:
        kept = super().kept_by_losses()
        if self.moe_entropy_loss_coeff:
            above_0 = KeptTensor("probabilities above 0", score=4)
            logarithms = KeptTensor("logarithms of the probabilities", score=4)
            kept += [PROBABILITIES, above_0, logarithms, LOSS]
        return kept

    def state_bytes(self, num_experts: int, vocabulary: int) -> int:
        of_integral = 0 if self.controlled is None else 4
        return super().state_bytes(num_experts, vocabulary) + of_integral

    def time_constants(self, config: Config) -> list[TimeConstant]:
        """That of p is (1 + K_p) / K_i, where the experts are equally probable."""
        found = super().time_constants(config)
        if self.moe_top_p_target_experts is None:
            return found
        steps = (1 + self.moe_top_p_proportional_gain) / self.moe_top_p_integral_gain
        return [*found, TimeConstant("controlled p", steps, "raise --moe-top-p-integral-gain")]

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        for name in ("moe_inference_max_experts", "moe_top_p_target_experts"):
            if getattr(self, name) is not None:
                check_at_most_all(self, name, config, or_else=", or none")
        if self.moe_top_p_target_experts is None:
            self._check_fixed_p()

    def _check_fixed_p(self) -> None:
        for name in ("moe_top_p_proportional_gain", "moe_top_p_integral_gain"):
            value = getattr(self, name)
            if value != getattr(DynamicChoices, name):
                raise InputError(
                    f"{flag(name)} is {value}, but p is fixed: set --moe-top-p-target-experts, or "
                    "leave it out"
                )


@dataclass(frozen=True)
class ExpertsChoose(Selection):
    """Experts choose among all tokens of the micro-batch, also later ones (Zhou et al. 2022)."""

    moe_expert_choice_capacity_factor: float = option(
        2.0, "each expert takes round(factor * tokens / n) tokens", above=0
    )
    moe_expert_choice_scores: str = option(
        "raw",
        "scores by which experts rank tokens and weight their outputs: as they are (raw), or their "
        "softmax over experts (softmax)",
        choices=("raw", "softmax"),
    )

    @property
    def mean_choices(self) -> float:
        return self.moe_expert_choice_capacity_factor

    @property
    def experts_take(self) -> float:
        return self.moe_expert_choice_capacity_factor

    def kept_by_rule(self) -> list[KeptTensor] | None:
        return [SCORES if self.moe_expert_choice_scores == "raw" else PROBABILITIES, EXPERTS]

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
