"""Systems with a router that dispatch tokens to SwiGLU experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.message import flag
from moe_parallel.config.option import option
from moe_parallel.config.selection.parts import DispatchedSelection
from moe_parallel.config.selection.selection import LayerWeights, ProductWeights
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


#: The initializations of W_up: see `up_std`.
UP_INIT_METHODS = ("normal", "scaled")


def up_std(method: str, low_rank_size: int) -> float | None:
    """The standard deviation of the initial W_up. None: that of the other weights.

    Let tokens x have an RMS of 1, and weights a standard deviation of s. Then x W_g and x W_down
    both start with a standard deviation of s sqrt(d). Each number of x W_down W_up is a sum over
    d_low numbers of x W_down. With N(0, 1 / d_low) for W_up, the standard deviation stays the
    same. With N(0, s^2) it is multiplied by s sqrt(d_low).
    """
    return low_rank_size**-0.5 if method == "scaled" else None


def aoe_wide_size(hidden_size: int, ffn_hidden_size: int, low_rank_size: int) -> int:
    """d_wide by Eq. 5, rounded: an AoE expert then has as many parameters as a SwiGLU expert.

    AoE expert: d_low d + d_low d_wide + 2 d d_wide. SwiGLU expert: 3 d d_ffn.
    """
    d, d_ffn, d_low = hidden_size, ffn_hidden_size, low_rank_size
    return round((3 * d * d_ffn - d_low * d) / (d_low + 2 * d))


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
