"""Who decides which expert computes: one frozen dataclass per system, one word names it.

`--expert-selection` picks the class; only its options are then valid. A new system is a new class
here, entered in `SELECTIONS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_parallel.config.option import option

_TOPK = "experts per token (K)"
_AUX = "weight alpha of the load-balancing loss alpha * n * sum f_i P_i; 0: off"


@dataclass(frozen=True)
class TopKSelection:
    """A linear softmax router picks the K most probable experts (Shazeer 2017; Switch for K=1)."""

    moe_router_topk: int = option(2, _TOPK)
    moe_aux_loss_coeff: float = option(0.01, _AUX)
    moe_z_loss_coeff: float = option(
        0.0, "weight of mean(logsumexp(router logits)^2), about 1e-3; 0: off"
    )

    def expert_width(self, hidden_size: int, ffn_hidden_size: int) -> int:
        """The inner width of an expert: that of a SwiGLU expert, d_ffn."""
        return ffn_hidden_size


@dataclass(frozen=True)
class AoESelection:
    """Autonomy-of-Experts: experts rank themselves by the norm of x W_down; there is no router."""

    moe_router_topk: int = option(2, _TOPK)
    moe_aux_loss_coeff: float = option(0.01, _AUX)
    aoe_low_rank_size: int = option(64, "rank of W_g = W_down W_up (d_low)")
    aoe_wide_size: int | None = option(
        None,
        "expert width (d_wide); none: Eq. 5 of the AoE paper, so that an expert has as many "
        "parameters as a SwiGLU expert of --moe-ffn-hidden-size",
    )

    def expert_width(self, hidden_size: int, ffn_hidden_size: int) -> int:
        """The inner width of an expert, d_wide."""
        return self.aoe_wide_size or aoe_wide_size(
            hidden_size, ffn_hidden_size, self.aoe_low_rank_size
        )


Selection = TopKSelection | AoESelection

SELECTIONS: dict[str, type[Selection]] = {"topk": TopKSelection, "aoe": AoESelection}


def selection_name(selection: Selection) -> str:
    """The word that names the system of `selection` on the command line."""
    return next(name for name, kind in SELECTIONS.items() if type(selection) is kind)


def aoe_wide_size(hidden_size: int, ffn_hidden_size: int, low_rank_size: int) -> int:
    """d_wide of Eq. 5, rounded: an AoE expert with as many parameters as a SwiGLU expert.

    AoE expert: d_low d + d_low d_wide + 2 d d_wide; SwiGLU expert: 3 d d_ffn.
    """
    d, d_ffn, d_low = hidden_size, ffn_hidden_size, low_rank_size
    return round((3 * d * d_ffn - d_low * d) / (d_low + 2 * d))
