"""What systems of expert selection share: sets of options that their classes combine."""

from __future__ import annotations

from dataclasses import dataclass

from moe_parallel.config.option import option


@dataclass(frozen=True)
class ExpertSelection:
    """Any system."""

    def expert_width(self, hidden_size: int, ffn_hidden_size: int) -> int:
        """The inner width of an expert: d_ffn for a SwiGLU expert."""
        return ffn_hidden_size

    @property
    def choices_per_token(self) -> int | None:
        """K; None where it varies."""
        return None

    @property
    def mean_choices(self) -> float | None:
        """Experts that compute a token on average; None: only training will tell."""
        return self.choices_per_token

    @property
    def first_part(self) -> int | None:
        """Tokens at the start of a sequence that are judged apart; None: there are none."""
        return None

    @property
    def caution(self) -> str | None:
        """What a user has to know of the training loss; None: it is the likelihood of the text."""
        return None


@dataclass(frozen=True)
class DispatchedSelection(ExpertSelection):
    """Tokens travel to experts: what the systems that do so can all have."""

    moe_shared_expert_intermediate_size: int | None = option(
        None,
        "width of a SwiGLU layer that computes every token beside the chosen experts, in all: m "
        "shared experts of width f are one of width m * f; none: no shared expert",
        weights=True,
    )
    moe_shared_expert_gate: bool = option(
        False, "weigh the shared expert's output by sigmoid(x w), one number a token", weights=True
    )
    moe_shared_expert_overlap: bool = option(
        False, "compute the shared expert on a CUDA stream of its own while tokens travel"
    )


@dataclass(frozen=True)
class Balancing:
    """Losses and a bias that spread the load."""

    moe_aux_loss_coeff: float = option(
        0.01, "weight alpha of the load-balancing loss alpha * n * sum f_i P_i; 0: off"
    )
    moe_router_load_balancing_type: str = option(
        "aux_loss",
        "over what f and P of the load-balancing loss are taken: a micro-batch (aux_loss), each "
        "sequence (seq_aux_loss), or f over the global batch before (global_aux_loss)",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss"),
    )
    moe_importance_loss_coeff: float = option(
        0.0, "weight of (std / mean)^2 of the sums of gates over the experts; 0: off"
    )


@dataclass(frozen=True)
class BiasBalancing:
    """Load balance without a loss (Wang et al. 2024): a bias that only selects, never weighs."""

    moe_router_enable_expert_bias: bool = option(
        False,
        "add a bias to the scores that experts are selected by, raised after a step for experts "
        "chosen less than the mean, lowered for the others",
        weights=True,
    )
    moe_router_bias_update_rate: float = option(1e-3, "by how much a step moves that bias")


@dataclass(frozen=True)
class FixedChoices:
    """A fixed number of experts per token."""

    moe_router_topk: int = option(2, "experts per token (K)", weights=True)
    moe_aux_loss_per_choice: bool = option(
        False, "divide the load-balancing loss by MoE layers * K: alpha, where routing is uniform"
    )
    moe_router_force_load_balancing: bool = option(
        False, "for benchmarks: choose experts in turn, whatever the scores"
    )

    @property
    def choices_per_token(self) -> int:
        return self.moe_router_topk


@dataclass(frozen=True)
class DynamicChoices:
    """Top-P: the fewest experts whose probabilities sum to p (Huang et al. 2024)."""

    moe_top_p: float = option(0.4, "probability p that the chosen experts together reach")
    moe_top_p_strict: bool = option(
        False, "stop above p (the authors' code), not at p or above (the paper)"
    )
    moe_inference_top_p: float | None = option(None, "p in evaluations; none: --moe-top-p")
    moe_inference_max_experts: int | None = option(
        None, "most experts per token in evaluations; none: no limit"
    )
    moe_entropy_loss_coeff: float = option(
        1e-4, "weight of the dynamic loss, the mean entropy of the probabilities; 0: off"
    )


@dataclass(frozen=True)
class ExpertsChoose:
    """Experts choose tokens (Zhou et al. 2022). Each sees the whole micro-batch, the future too."""

    moe_expert_choice_capacity_factor: float = option(
        2.0, "each expert takes round(factor * tokens / n) tokens"
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
