"""threshold, aoe_threshold: each expert takes the tokens whose score is above its own cutoff.

The rule (`Threshold`), the cutoffs and how they move, and the records.

Shape suffixes: T tokens of this rank, A tokens of a micro-batch, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import torch
import torch.distributed as dist

from moe_parallel.balancing.bias import ExpertBias
from moe_parallel.balancing.load import StepMean, exceeded_by_share
from moe_parallel.layers import AutonomousLayer, RoutedLayer, Rules, System, register
from moe_parallel.layers.expert_layer import LayerConfig
from moe_parallel.selection.choices import Choices, chosen_of, slots_of
from moe_parallel.selection.rules import (
    Gate,
    above,
    sigmoid,
    sigmoid_of_value,
    softmax,
    softmax_of_scores,
)
from moe_parallel.selection.tokens import Tokens
from moe_parallel.systems.threshold import AoEThresholdSelection, Cutoffs, ThresholdSelection


@dataclass(frozen=True)
class Threshold:
    """Expert i is chosen if s_i + b_i > level. A token has any number of experts, also none.

    Expert threshold routing (arXiv 2603.11535): the level is 0, and -b_i is the cutoff of expert i.
    Routing-Free MoE (arXiv 2604.00801): the level is theta, and -b_i is learned.
    """

    gate: Gate
    level: float = 0.0
    bias_E: torch.Tensor | None = None  # None: 0

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        chosen_TE, probs_TE, values_TE = above(scores_TE, self.bias_E, self.level, self.gate)
        experts_TK, probs_TK = slots_of(chosen_TE, probs_TE)
        return _choices(experts_TK, probs_TK, scores_TE, values_TE)

    def of(self, scores_TE: torch.Tensor, experts_TK: torch.Tensor) -> Choices:
        """The choices of given experts: int64 [T, K]; -1: the slot is empty."""
        values_TE = scores_TE if self.bias_E is None else scores_TE + self.bias_E
        probs_TE = self.gate(scores_TE, values_TE, chosen_of(experts_TK, scores_TE) > 0)
        probs_TK = probs_TE.gather(1, experts_TK.clamp(min=0))
        return _choices(experts_TK, probs_TK, scores_TE, values_TE)

    def with_bias(self, bias_E: torch.Tensor) -> Threshold:
        """This rule with `bias_E` added to the scores."""
        return replace(self, bias_E=bias_E)

    def ranked(self, scores_TE: torch.Tensor) -> torch.Tensor:
        """The values without the bias and without gradient."""
        return scores_TE.detach()


def _choices(
    experts_TK: torch.Tensor,
    probs_TK: torch.Tensor,
    scores_TE: torch.Tensor,
    values_TE: torch.Tensor,
) -> Choices:
    return Choices(experts_TK, probs_TK, scores_TE, softmax(scores_TE), values_TE=values_TE)


class ExpertCutoffs(ExpertBias):
    """The cutoffs of a layer's experts. A subclass moves them."""

    observes = True

    def __init__(self, num_experts: int, start: float, mean_choices: float, rate: float) -> None:
        """
        Args:
            start: the cutoff of all experts until the first step ends.
            mean_choices: K; an expert is to compute K / n of the tokens.
            rate: how fast the cutoffs move.
        """
        super().__init__(num_experts, rate)
        self.bias_E.fill_(-start)
        self.mean_choices = mean_choices

    @property
    def cutoff_E(self) -> torch.Tensor:
        """fp32 [E]."""
        return -self.bias_E


class QuantileCutoffs(ExpertCutoffs):
    """Each cutoff is a running mean of the number that K / n of the tokens' scores exceed.

    q_i is the mean of that number over the micro-batches of a step (`exceeded_by_share`). The
    running mean keeps the share beta in a step (arXiv 2603.11535), and `start` does not count:
    w <- beta w + 1 - beta and c <- c + (1 - beta) / w (q - c), which is raw / (1 - beta^t) for
    raw <- beta raw + (1 - beta) q. `weight_1`, fp32, is w and is saved with the model.
    """

    weight_1: torch.Tensor

    def __init__(self, num_experts: int, start: float, mean_choices: float, ema: float) -> None:
        """`ema`: beta."""
        super().__init__(num_experts, start, mean_choices, rate=1 - ema)
        self.register_buffer("weight_1", torch.zeros(1))
        self.quantiles = StepMean(num_experts)

    @torch.no_grad()
    def observe(self, ranked_TE: torch.Tensor, choices_per_token: int, tokens: Tokens) -> None:
        ranked_AE = tokens.of_micro_batch(ranked_TE).double()
        if len(ranked_AE) > 1:  # nothing is between the scores of one token
            self.quantiles.add(exceeded_by_share(ranked_AE, self.mean_choices))

    @torch.no_grad()
    def update(self, counts_E: torch.Tensor, group: dist.ProcessGroup) -> None:
        quantile_E, number = self.quantiles.finish(group)
        # Not by `if`, because the host would wait for the device.
        new = self.update_rate * (number > 0).double()
        weight_1 = (1 - new) * self.weight_1.double() + new
        share_1 = new / weight_1.where(weight_1 > 0, 1)
        self.bias_E.copy_(self.bias_E - share_1 * (quantile_E + self.bias_E))
        self.weight_1.copy_(weight_1)


class SignCutoffs(ExpertCutoffs):
    """c_i += u * sign(load of i - K / n of the tokens) (J. Su, kexue.fm/archives/11626)."""

    tokens_1: torch.Tensor

    def __init__(self, num_experts: int, start: float, mean_choices: float, rate: float) -> None:
        """`rate`: u."""
        super().__init__(num_experts, start, mean_choices, rate)
        tokens_1 = torch.zeros(1, dtype=torch.float64)  # of this step, on this rank
        self.register_buffer("tokens_1", tokens_1, persistent=False)

    @torch.no_grad()
    def observe(self, ranked_TE: torch.Tensor, choices_per_token: int, tokens: Tokens) -> None:
        self.tokens_1 += len(ranked_TE)

    @torch.no_grad()
    def update(self, counts_E: torch.Tensor, group: dist.ProcessGroup) -> None:
        if group.size() > 1:
            dist.all_reduce(self.tokens_1, group=group)
        # Whole numbers, so that a load that is right leaves its cutoff, also for K = 2.3.
        k, of = Fraction(str(self.mean_choices)).as_integer_ratio()
        lacks_E = k * self.tokens_1 - of * len(counts_E) * counts_E
        self.bias_E += self.update_rate * torch.sign(lacks_E).to(self.bias_E.dtype)
        self.tokens_1.zero_()


def expert_cutoffs(
    selection: Cutoffs, config: LayerConfig, train_iters: int | None
) -> ExpertCutoffs:
    """The cutoffs that a score must exceed."""
    n, k = config.num_moe_experts, selection.mean_choices
    start = selection.first_cutoff(config.hidden_size, n, config.init_method_std)
    if selection.moe_threshold_update == "sign":
        return SignCutoffs(n, start, k, selection.moe_threshold_update_rate)
    return QuantileCutoffs(n, start, k, selection.ema(train_iters))


_PROBS = {"softmax": softmax_of_scores, "sigmoid": sigmoid_of_value}


def rules(selection: ThresholdSelection) -> Rules:
    rule = Threshold(sigmoid)
    return Rules(rule, rule)


def rules_of_norms(selection: AoEThresholdSelection) -> Rules:
    rule = Threshold(_PROBS[selection.aoe_threshold_gate])
    return Rules(rule, rule)


THRESHOLD = register(
    System(
        ThresholdSelection,
        layer=RoutedLayer,
        rules=rules,
        bias=expert_cutoffs,
    )
)
AOE_THRESHOLD = register(
    System(AoEThresholdSelection, layer=AutonomousLayer, rules=rules_of_norms, bias=expert_cutoffs)
)
