"""The balancing bias: a number per expert, added to what ranks the experts, for the selection only.

A bias is the same on every rank and in every layout, and changes only between steps, by what was
counted over a whole global batch. A step selects with the bias of the step before.

Shape suffixes: T tokens of this rank, A tokens of a micro-batch, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from moe_parallel.balancing.load import StepMean, exceeded_by_share, keeping_dtypes, midpoint
from moe_parallel.config import BiasBalancing, Selection, TopKChoices
from moe_parallel.selection.tokens import Tokens


class ExpertBias(nn.Module):
    """Loss-free balancing (Wang et al. 2024): b_i += u * sign(mean load - load of i).

    Then the mean of b is subtracted, which does not change the selection. Otherwise the mean would
    grow, because the signs of a step do not sum to 0, until fp32 rounds the scores away.

    `bias_E`, fp32, is saved with the model. It affects neither probs nor gradients.
    """

    observes: ClassVar[bool] = False  # whether `observe` needs to be called
    bias_E: torch.Tensor

    def __init__(self, num_experts: int, update_rate: float) -> None:
        super().__init__()
        self.update_rate = update_rate
        self.register_buffer("bias_E", torch.zeros(num_experts))

    @property
    def cutoff_E(self) -> torch.Tensor | None:
        """What each score must exceed, fp32 [E]. None: scores are only ranked."""
        return None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        return keeping_dtypes(self, fn, super()._apply)

    def observe(self, ranked_TE: torch.Tensor, choices_per_token: int, tokens: Tokens) -> None:
        """Sees a micro-batch of a step, on this rank. Collective over the ranks of `tokens`.

        Args:
            ranked_TE: fp32, the values that rank the experts, without the bias.
        """

    @torch.no_grad()
    def update(self, counts_E: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Ends a step, in which each expert was chosen `counts_E` times, fp64. Collective.

        The sum of the counts is compared with E times each count, which is exact. A mean would be
        rounded, and the bias would drift even if the load were equal.
        """
        lacks_E = counts_E.sum() - len(counts_E) * counts_E
        self._move(self.update_rate * torch.sign(lacks_E))

    def _move(self, step_E: torch.Tensor) -> None:
        """Adds `step_E` to the bias and subtracts the mean, which selects nothing."""
        bias_E = self.bias_E.double() + step_E
        self.bias_E.copy_(bias_E - bias_E.mean())


class ProportionalBias(ExpertBias):
    """b_i += u * e_i with e_i = (mean load - load of i) / mean load; then the mean of b is 0.

    LongCat-Flash (arXiv 2509.01322) updates by shares of the load, which is this up to a factor in
    u. A load that is nearly equal moves the bias little, where the sign moves it by u.
    """

    @torch.no_grad()
    def update(self, counts_E: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._move(self.update_rate * _error(counts_E))


class IntegralDerivativeBias(ProportionalBias):
    """b_i += u * (e_i + d_i), with d_i the growth of an error that grows (arXiv 2609.39137).

    d_i = e_i - e'_i if e'_i (e_i - e'_i) > 0 and 0 otherwise, for the error e'_i of the step
    before, so an error that shrinks by itself is not pushed back. `error_E`, fp32, is e' and is
    saved with the model.
    """

    error_E: torch.Tensor

    def __init__(self, num_experts: int, update_rate: float) -> None:
        super().__init__(num_experts, update_rate)
        self.register_buffer("error_E", torch.zeros(num_experts))

    @torch.no_grad()
    def update(self, counts_E: torch.Tensor, group: dist.ProcessGroup) -> None:
        error_E, before_E = _error(counts_E), self.error_E.double()
        growth_E = error_E - before_E
        self._move(self.update_rate * (error_E + growth_E * (before_E * growth_E > 0)))
        self.error_E.copy_(error_E)


class QuantileBias(ExpertBias):
    """The bias that would have balanced the step's micro-batches exactly (quantile balancing).

    Equal loads are the constraint of an assignment problem, and -b_i are the prices of its dual. A
    coordinate step on the dual computes the threshold a_t of each token's K-th choice under the
    current bias, and then sets b_i so that A K / n tokens exceed it: -b_i is a quantile over t of
    s_ti - a_t (Kimi K3, arXiv 2607.24653, appendix C; there with (K+1)-th values). Thresholds and
    quantiles are midpoints between neighbors in the order: they solve the same problem and leave no
    ties. `update` moves the bias by 1 - `ema` of the way to the mean over the micro-batches; the
    mean of the bias is 0.
    """

    observes = True

    def __init__(self, num_experts: int, ema: float) -> None:
        super().__init__(num_experts, 0.0)
        self.ema = ema
        self.solved = StepMean(num_experts)

    @torch.no_grad()
    def observe(self, ranked_TE: torch.Tensor, choices_per_token: int, tokens: Tokens) -> None:
        ranked_AE = tokens.of_micro_batch(ranked_TE).double()
        if len(ranked_AE) == 1:  # one token loads no two experts equally
            return
        self.solved.add(self._solve(ranked_AE, choices_per_token))

    def _solve(self, ranked_AE: torch.Tensor, k: int) -> torch.Tensor:
        """One coordinate step on the dual: fp64 [E]."""
        threshold_A1 = midpoint(ranked_AE + self.bias_E, k, dim=1)
        return -exceeded_by_share(ranked_AE - threshold_A1, k)

    @torch.no_grad()
    def update(self, counts_E: torch.Tensor, group: dist.ProcessGroup) -> None:
        solved_E, number = self.solved.finish(group)
        moved_E = self.ema * self.bias_E + (1 - self.ema) * (solved_E - solved_E.mean())
        # Not by `if`, because the host would wait for the device.
        self.bias_E.copy_(torch.where(number > 0, moved_E, self.bias_E.double()))


class AnchoredBias(ExpertBias):
    """b_i += u * (t - load of i) / t, with t = K_e tokens / n, for the n experts; 0 for free ones.

    So the n experts together get K_e choices per token, equally loaded, and the free ones the rest
    of K. LongCat-Flash (arXiv 2509.01322) updates by shares of the load, which is this up to a
    factor in u. The mean of b is not subtracted: the zeros of the free experts are what the others
    are measured against.
    """

    def __init__(
        self, num_experts: int, update_rate: float, num_free: int, k: int, k_e: float
    ) -> None:
        """
        Args:
            num_experts: n.
            k, k_e: of every k choices, k_e are to fall on the n experts.
        """
        super().__init__(num_experts + num_free, update_rate)
        self.num_experts, self.k, self.k_e = num_experts, k, k_e

    @torch.no_grad()
    def update(self, counts_E: torch.Tensor, group: dist.ProcessGroup) -> None:
        # In whole numbers up to the last division, because an error of 0 must leave the bias.
        k_e, of = Fraction(str(self.k_e)).as_integer_ratio()
        wanted = counts_E.sum() * k_e
        error_E = wanted - of * self.num_experts * self.k * counts_E[: self.num_experts]
        step_E = self.update_rate * error_E / wanted.clamp(min=1)
        self.bias_E[: self.num_experts] += step_E.to(self.bias_E.dtype)


def _error(counts_E: torch.Tensor) -> torch.Tensor:
    """(mean load - load) / mean load of each expert, fp64; exactly 0 for an equal load."""
    total = counts_E.sum()
    return (total - len(counts_E) * counts_E) / total.clamp(min=1)


#: The class for each --moe-router-bias-update, and the option that is its second argument.
_UPDATES: dict[str, tuple[Callable[[int, float], ExpertBias], str]] = {
    "sign": (ExpertBias, "moe_router_bias_update_rate"),
    "error": (ProportionalBias, "moe_router_bias_update_rate"),
    "id": (IntegralDerivativeBias, "moe_router_bias_update_rate"),
    "quantile": (QuantileBias, "moe_router_bias_ema"),
}


def balancing_bias(selection: Selection, config: Any, train_iters: int | None) -> ExpertBias | None:
    """The balancing bias of a layer. None without --moe-router-enable-expert-bias.

    Args:
        config: of the layer (`LayerConfig`).
        train_iters: of the run; None: no run trains the layer.
    """
    if not (isinstance(selection, BiasBalancing) and selection.moe_router_enable_expert_bias):
        return None
    n = config.num_moe_experts
    if isinstance(selection, TopKChoices) and selection.free_experts:
        rate = selection.moe_router_bias_update_rate
        assert rate is not None  # `Selection.rescaled` has set it
        return _anchored_bias(selection, rate, n)
    build, option = _UPDATES[selection.moe_router_bias_update]
    return build(n, getattr(selection, option))


def _anchored_bias(selection: TopKChoices, rate: float, num_experts: int) -> AnchoredBias:
    num_free = selection.free_experts
    k, k_e = selection.choices_per_token, selection.moe_ffn_experts_per_token
    if k is None or k_e is None:  # all columns equally loaded
        return AnchoredBias(num_experts, rate, num_free, num_experts + num_free, num_experts)
    return AnchoredBias(num_experts, rate, num_free, k, k_e)
