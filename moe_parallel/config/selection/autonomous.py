"""Experts rank themselves by the norm of x W_down: Autonomy-of-Experts with each rule."""

from __future__ import annotations

from dataclasses import dataclass

from moe_parallel.config.option import option, with_default
from moe_parallel.config.selection.parts import (
    Balancing,
    BiasBalancing,
    DispatchedSelection,
    DynamicChoices,
    ExpertsChoose,
    FixedChoices,
)

#: How W_up of a factorised W_g = W_down W_up starts: see `up_std`.
UP_INIT_METHODS = ("normal", "scaled")


@dataclass(frozen=True)
class AutonomousSelection(DispatchedSelection):
    """The experts of AoE: E(x) = (SiLU(x W_down W_up) * (x W_p)) W_o."""

    aoe_low_rank_size: int = option(64, "rank of W_g = W_down W_up (d_low)", weights=True)
    aoe_wide_size: int | None = option(
        None,
        "expert width (d_wide); none: Eq. 5 of the AoE paper, so that an expert has as many "
        "parameters as a SwiGLU expert of --moe-ffn-hidden-size",
    )
    aoe_up_init_method: str = option(
        "normal",
        "initial W_up: N(0, s^2) with s = --init-method-std, as all weights, so that the gate "
        "x W_down W_up starts s sqrt(d_low) times as large as x W_g (normal), or N(0, 1 / d_low), "
        "so that it starts just as large (scaled). Norms, and so who is chosen, start the same",
        choices=UP_INIT_METHODS,
    )
    aoe_gradient: str = option(
        "full",
        "through which norms scores learn: all (full), or those of the chosen experts (selected): "
        "cheaper, and exact where the others have no gradient, so refused with a loss on routing "
        "or gates over all norms, unless as selected_despite_aux, which drops the rest",
        choices=("full", "selected", "selected_despite_aux"),
    )

    aoe_recompute_scores: bool = option(
        True,
        "the products x W_down of the experts that were not chosen are made again in the backward "
        "pass; false: kept, for speed at the price of n d_low values a token",
    )
    aoe_recompute_gate: bool = option(
        True,
        "C W_up is made again in the backward pass; false: kept, at the price of K d_wide values "
        "a token",
    )
    aoe_send_activations: bool = option(
        False,
        "between ranks send C = x W_down with each token instead of making it again where its "
        "expert is: d_low / d more traffic, so only for links that are faster than the product",
    )
    aoe_gather_w_down: bool = option(
        False,
        "a rank keeps W_down of its own experts alone and gathers the others' in each layer, "
        "forward and backward; false: every rank keeps W_down of all experts",
    )

    @property
    def up_std(self) -> float | None:
        """Standard deviation of initial W_up; None: that of the other weights."""
        return up_std(self.aoe_up_init_method, self.aoe_low_rank_size)

    def expert_width(self, hidden_size: int, ffn_hidden_size: int) -> int:
        """The inner width of an expert, d_wide."""
        return self.aoe_wide_size or aoe_wide_size(
            hidden_size, ffn_hidden_size, self.aoe_low_rank_size
        )


@dataclass(frozen=True)
class AoESelection(BiasBalancing, Balancing, FixedChoices, AutonomousSelection):
    """Autonomy-of-Experts: the K experts of greatest norm; there is no router."""

    # Norms differ by tenths, probabilities by hundredths.
    moe_router_bias_update_rate: float = with_default(
        BiasBalancing, "moe_router_bias_update_rate", 1e-2
    )
    aoe_gate: str = option(
        "selected",
        "gates: softmax over the norms of the selected experts, or over all, not renormalised",
        choices=("selected", "all"),
        weights=True,
    )
    aoe_fp8_screening: int = option(
        0,
        "M > 0: norms of all experts in FP8 name the K + M candidates of a token, and the norms of "
        "these, computed as ever, choose among them; needs a selected --aoe-gradient. 0: off",
    )


@dataclass(frozen=True)
class AoETopPSelection(DynamicChoices, Balancing, AutonomousSelection):
    """AoE, with as many experts as it takes for the softmax of norms to reach p."""

    moe_top_p: float = with_default(DynamicChoices, "moe_top_p", 0.6)


@dataclass(frozen=True)
class AoEExpertChoiceSelection(ExpertsChoose, AutonomousSelection):
    """AoE, where each expert takes the tokens of greatest norm."""


def up_std(method: str, low_rank_size: int) -> float | None:
    """Standard deviation of initial W_up; None: that of the other weights.

    By tokens x of RMS 1, x W_g starts with a standard deviation of s sqrt(d) where weights have s.
    x W_down has s sqrt(d) as well, and W_up adds up d_low of its numbers: N(0, 1 / d_low) keeps
    the size, and N(0, s^2) leaves s sqrt(d_low) of it.
    """
    return low_rank_size**-0.5 if method == "scaled" else None


def aoe_wide_size(hidden_size: int, ffn_hidden_size: int, low_rank_size: int) -> int:
    """d_wide of Eq. 5, rounded: an AoE expert with as many parameters as a SwiGLU expert.

    AoE expert: d_low d + d_low d_wide + 2 d d_wide; SwiGLU expert: 3 d d_ffn.
    """
    d, d_ffn, d_low = hidden_size, ffn_hidden_size, low_rank_size
    return round((3 * d * d_ffn - d_low * d) / (d_low + 2 * d))
