"""The kinds of systems: with a router, without one (AoE), and with merged experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NoReturn

from moe_parallel.config.message import flag
from moe_parallel.config.option import option
from moe_parallel.config.selection.parts import DispatchedSelection
from moe_parallel.config.selection.selection import Selection
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

    def expert_width(self, hidden_size: int, ffn_hidden_size: int) -> int:
        if self.moe_gate_low_rank_size is None:
            return ffn_hidden_size
        return aoe_wide_size(hidden_size, ffn_hidden_size, self.moe_gate_low_rank_size)

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

    @property
    def low_rank_sizes(self) -> list[tuple[str, int]]:
        return [("--aoe-low-rank-size", self.aoe_low_rank_size)]

    def score_range(self, config: Config) -> float:
        """Eight standard deviations of the initial norms over experts, each s sqrt(d / 2)."""
        return 8 * config.model.init_method_std * math.sqrt(config.model.hidden_size / 2)

    @property
    def probs_over_all(self) -> bool:
        """Whether the probs are a softmax over the norms of all experts."""
        return False

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        etp, width = config.parallel.expert_tensor_size, config.model.hidden_size
        if self.aoe_gather_w_down and width % etp:
            raise InputError(
                f"--aoe-gather-w-down cuts W_down along --hidden-size {width}, which "
                f"--expert-tensor-parallel-size {etp} does not divide: choose a multiple of {etp}, "
                "or leave it out"
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


@dataclass(frozen=True)
class MergedSelection(Selection):
    """A softmax router weights the matrices of all experts, and their sum computes the tokens."""

    merges: ClassVar[bool] = True

    @property
    def choices_per_token(self) -> int:
        """One merged expert computes a token."""
        return 1

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        parallel, moe = config.parallel, config.moe
        if parallel.expert_model_parallel_size > 1:
            raise InputError(
                f"--expert-model-parallel-size is {parallel.expert_model_parallel_size}, but "
                "merged experts are divided by their matrices: leave it out and raise "
                "--tensor-model-parallel-size"
            )
        if parallel.expert_tensor_size != parallel.tensor_model_parallel_size:
            raise InputError(
                f"--expert-tensor-parallel-size is {parallel.expert_tensor_size}, but merged "
                "experts are divided over --tensor-model-parallel-size "
                f"{parallel.tensor_model_parallel_size}: leave it out"
            )
        if moe.moe_expert_capacity_factor is not None:
            raise InputError(
                f"--moe-expert-capacity-factor is {moe.moe_expert_capacity_factor}, but no token "
                "is sent to merged experts: leave it out"
            )
        if moe.moe_activation_budget is not None:
            raise InputError(
                f"--moe-activation-budget is {moe.moe_activation_budget}, but merged experts "
                "receive no rows, so their activations do not grow with the load: leave it out"
            )


@dataclass(frozen=True)
class Segments(Selection):
    """Sequences are split into segments, and all tokens of a segment are routed together."""

    lory_segment_length: int = option(256, "number of tokens per segment (T_s)", least=1)

    @property
    def first_part(self) -> int:
        return self.lory_segment_length

    @property
    def settled_after(self) -> int | None:
        """The first segment, whose tokens see its mean; later ones see only complete segments."""
        return self.lory_segment_length

    @property
    def by_sequence(self) -> bool:
        return True

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        refuse_own_documents(self, config)
        length, seq_length = self.lory_segment_length, config.training.seq_length
        if length > seq_length:
            raise InputError(
                f"--lory-segment-length is {length}, above --seq-length {seq_length}: choose at "
                f"most {seq_length}"
            )


def refuse_own_documents(selection: Selection, config: Config) -> None:
    """Raise InputError for --reset-attention-mask, which the means of tokens would not respect."""
    if config.training.reset_attention_mask:
        raise InputError(
            f"--reset-attention-mask is true, but --expert-selection {selection.system} routes by "
            "the mean of tokens that may belong to several documents, so they would still see "
            "each other: leave it out"
        )
