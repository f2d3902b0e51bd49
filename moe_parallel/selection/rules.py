"""What a token chooses, from its scores: the rules that training and exported models share.

Pure functions that need torch alone, because tools/export_hf.py copies this file next to the
weights as rules_moe_parallel.py. In training `Choices`, losses and distribution stand around them;
in an export `MoeParallelGate`.

Shape suffixes: T tokens, E all experts, K slots per token (first choice first), G groups of
experts or segments of a sequence, M experts of a group, B sequences, Z free experts, D model width,
C constant experts, A the two parts of their output. In scores, E includes the free experts, which
come last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


def softmax(scores_TE: torch.Tensor) -> torch.Tensor:
    """Scores as probabilities over all E experts."""
    return torch.softmax(scores_TE, dim=1)


def sigmoid_shares(scores_TE: torch.Tensor) -> torch.Tensor:
    """Sigmoids divided by their sum over all E experts (DeepSeek-V3, section 2.1.2)."""
    # In logarithms, because every sigmoid rounds to 0 if all scores are far below 0.
    return torch.softmax(F.logsigmoid(scores_TE), dim=1)


# The probs of the chosen experts: (scores_TE, probabilities_TE, experts_TK) -> probs_TK.
ProbsOf = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def softmax_of_selected(
    scores_TE: torch.Tensor, probabilities_TE: torch.Tensor, experts_TK: torch.Tensor
) -> torch.Tensor:
    """The softmax over the scores of the chosen experts (AoE, Algorithm 2).

    It equals the softmax over all experts, renormalized over the chosen ones.
    """
    return torch.softmax(scores_TE.gather(1, experts_TK), dim=1)


def raw_probability(
    scores_TE: torch.Tensor, probabilities_TE: torch.Tensor, experts_TK: torch.Tensor
) -> torch.Tensor:
    """The probabilities, not renormalized over the chosen experts (Switch Transformer)."""
    return probabilities_TE.gather(1, experts_TK)


def raw_score(
    scores_TE: torch.Tensor, probabilities_TE: torch.Tensor, experts_TK: torch.Tensor
) -> torch.Tensor:
    """The scores, unchanged: the probs of expert choice with raw scores."""
    return scores_TE.gather(1, experts_TK)


def sigmoid_share_of_selected(
    scores_TE: torch.Tensor, probabilities_TE: torch.Tensor, experts_TK: torch.Tensor
) -> torch.Tensor:
    """Sigmoids divided by their sum over the chosen experts (DeepSeek-V3, Eq. 13)."""
    return torch.softmax(F.logsigmoid(scores_TE.gather(1, experts_TK)), dim=1)


def sigmoid_of_selected(
    scores_TE: torch.Tensor, probabilities_TE: torch.Tensor, experts_TK: torch.Tensor
) -> torch.Tensor:
    """The sigmoid. It is for K = 1, where a share would always be 1."""
    return torch.sigmoid(scores_TE.gather(1, experts_TK))


#: By scoring_func and norm_topk_prob of an export's config.json.
PROBS: dict[tuple[str, bool], ProbsOf] = {
    ("softmax", True): softmax_of_selected,
    ("softmax", False): raw_probability,
    ("raw", False): raw_score,
    ("sigmoid", True): sigmoid_share_of_selected,
    ("sigmoid", False): sigmoid_of_selected,
}


def renormalized(probs_TK: torch.Tensor, counts_TK: torch.Tensor) -> torch.Tensor:
    """The probs where `counts` is true, divided by their sum; 0 elsewhere, and if that sum is 0."""
    probs_TK = probs_TK.masked_fill(~counts_TK, 0)
    sums_T1 = probs_TK.sum(dim=1, keepdim=True)
    return probs_TK / (sums_T1 + (sums_T1 == 0))


@dataclass(frozen=True)
class WithoutZeroExperts:
    """`probs`, but 0 for a chosen zero expert; the others are divided by their sum (MoE++, code).

    If all choices of a token are zero experts, or the other probs underflow next to that of a zero
    expert, all its probs are 0.
    """

    probs: ProbsOf
    num_free: int  # the last columns of the scores
    num_zero: int  # the first of these

    def __call__(
        self, scores_TE: torch.Tensor, probabilities_TE: torch.Tensor, experts_TK: torch.Tensor
    ) -> torch.Tensor:
        first = scores_TE.shape[1] - self.num_free
        counts_TK = (experts_TK < first) | (experts_TK >= first + self.num_zero)
        return renormalized(self.probs(scores_TE, probabilities_TE, experts_TK), counts_TK)


def greatest(values_TE: torch.Tensor, k: int, ties_TE: torch.Tensor | None = None) -> torch.Tensor:
    """The k experts with the largest values of each token, largest first: int64 [T, k].

    Equal values are in the order of `ties_TE`, largest first, if it is given, and then the lowest
    index comes first. NaN is the largest, as in torch.sort.
    """
    if ties_TE is None:
        return values_TE.argsort(dim=1, descending=True, stable=True)[:, :k]
    order_TE = ties_TE.argsort(dim=1, descending=True, stable=True)
    return order_TE.gather(1, greatest(values_TE.gather(1, order_TE), k))


@dataclass(frozen=True)
class GroupLimit:
    """Experts are chosen only from the groups with the highest scores (DeepSeek-V3, 2.1.2).

    The score of a group is the sum over its best k / topk experts, as in Megatron-Core.
    """

    num_groups: int
    topk: int  # groups that a token may choose from

    def limited(self, ranked_TE: torch.Tensor, scores_TE: torch.Tensor, k: int) -> torch.Tensor:
        """`ranked_TE` with -inf for the experts of all other groups; scores decide ties."""

        def best(x_TE: torch.Tensor) -> torch.Tensor:
            x_TGM = x_TE.unflatten(1, (self.num_groups, -1))
            return x_TGM.topk(max(1, k // self.topk), dim=2).values.sum(dim=2)

        groups = greatest(best(ranked_TE), self.topk, best(scores_TE))
        others_TG = ranked_TE.new_ones(len(ranked_TE), self.num_groups, dtype=torch.bool)
        others_TG = others_TG.scatter(1, groups, False)
        size = ranked_TE.shape[1] // self.num_groups
        return ranked_TE.masked_fill(others_TG.repeat_interleave(size, dim=1), -torch.inf)


Ranking = Callable[[torch.Tensor], torch.Tensor]


def ranked_for_topk(
    scores_TE: torch.Tensor,
    k: int,
    ranking: Ranking | None,
    bias_E: torch.Tensor | None,
    groups: GroupLimit | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The values of which a token takes the k `greatest`, and those that decide their ties.

    Args:
        scores_TE: without gradient.
        ranking: keeps the order of the scores, so it matters only beside a bias or groups. Where it
            saturates, the scores themselves decide. None: the scores.
        bias_E: for the selection only, not in probs (Wang et al. 2024).
    """
    if bias_E is None and groups is None:
        return scores_TE, None
    ranked_TE = scores_TE if ranking is None else ranking(scores_TE)
    if bias_E is not None:
        ranked_TE = ranked_TE + bias_E
    if groups is not None:
        ranked_TE = groups.limited(ranked_TE, scores_TE, k)
    return ranked_TE, None if ranking is None else scores_TE


ROUNDING = 1e-6  # fp32 probabilities sum to 1 only within it


def until_p(
    scores_TE: torch.Tensor, probabilities_TE: torch.Tensor, p: float | torch.Tensor, strict: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Top-p: experts in order of probability, until their probabilities sum to at least p.

    The expert that crosses p is needed too, so there is at least one (Huang et al. 2024, Eq. 4 to
    6).

    Args:
        p: above 0; a tensor, fp64 [], if it moves.
        strict: stop when the sum exceeds p.

    Returns all experts, their probabilities, and which of them are needed (bool), each [T, E].
    """
    # By scores, which differ where their probabilities round to the same number.
    experts_TE = greatest(scores_TE.detach(), scores_TE.shape[1])
    probs_TE = probabilities_TE.gather(1, experts_TE)
    # An expert is needed if the sum of those before it has not reached p. The sums are in fp64 so
    # that rounding adds no expert: n equal probabilities need exactly ceil(p n) experts.
    before_TE = probs_TE.detach().double().cumsum(dim=1) - probs_TE.detach().double()
    if isinstance(p, torch.Tensor):
        # Not by `if`, because the host would wait for the device.
        inclusive = torch.full_like(p, strict, dtype=torch.bool) | (p == 1)
        needed_TE = before_TE < p + torch.where(inclusive, ROUNDING, -ROUNDING)
    elif strict or p == 1:  # with p = 1 all experts are needed
        needed_TE = before_TE <= p + ROUNDING
    else:
        needed_TE = before_TE < p - ROUNDING
    needed_TE[:, 0] = True
    return experts_TE, probs_TE, needed_TE


# The probs of all experts, of which those of the chosen ones count: (scores_TE, values_TE,
# chosen_TE) -> probs_TE. A value is a score plus the bias.
Gate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def sigmoid(
    scores_TE: torch.Tensor, values_TE: torch.Tensor, chosen_TE: torch.Tensor
) -> torch.Tensor:
    """The sigmoid of the scores, not divided by a sum (expert threshold routing)."""
    return torch.sigmoid(scores_TE)


def sigmoid_of_value(
    scores_TE: torch.Tensor, values_TE: torch.Tensor, chosen_TE: torch.Tensor
) -> torch.Tensor:
    """The sigmoid of the values, at least 1/2 for an expert that is chosen above level 0."""
    return torch.sigmoid(values_TE)


def softmax_of_scores(
    scores_TE: torch.Tensor, values_TE: torch.Tensor, chosen_TE: torch.Tensor
) -> torch.Tensor:
    """The softmax over the scores of all experts, not renormalized over the chosen ones."""
    return softmax(scores_TE)


def raw_value(
    scores_TE: torch.Tensor, values_TE: torch.Tensor, chosen_TE: torch.Tensor
) -> torch.Tensor:
    """The values, unchanged (Routing-Free MoE)."""
    return values_TE


def softmax_of_chosen(
    scores_TE: torch.Tensor, values_TE: torch.Tensor, chosen_TE: torch.Tensor
) -> torch.Tensor:
    """The softmax over the values of the chosen experts, as AoE weights them."""
    # Not by -inf, of which a token without an expert would make NaN.
    lowest = torch.finfo(values_TE.dtype).min
    return torch.softmax(values_TE.masked_fill(~chosen_TE, lowest), dim=1)


#: By scoring_func of an export's config.json.
GATES: dict[str, Gate] = {
    "sigmoid": sigmoid,
    "sigmoid_of_value": sigmoid_of_value,
    "softmax": softmax_of_scores,
    "raw_value": raw_value,
    "softmax_of_chosen": softmax_of_chosen,
}


def above(
    scores_TE: torch.Tensor, bias_E: torch.Tensor | None, level: float, gate: Gate
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Whether each expert is chosen (bool), its prob, and its value, the score plus the bias.

    A value that equals the level is not above it, so that no tie is broken by the number of an
    expert.
    """
    values_TE = scores_TE if bias_E is None else scores_TE + bias_E
    chosen_TE = values_TE > level
    return chosen_TE, gate(scores_TE, values_TE, chosen_TE), values_TE


#: The weights of the first segment, which has no previous one: [G, B, E] -> [1, B, E], without
#: gradient.
FirstSegment = Callable[[torch.Tensor], torch.Tensor]


def own(e_GBE: torch.Tensor) -> torch.Tensor:
    """The first segment's own weights, without gradient. Its tokens then see later tokens."""
    return e_GBE[:1].detach()


def uniform(e_GBE: torch.Tensor) -> torch.Tensor:
    """1/n for each expert."""
    return torch.full_like(e_GBE[:1], 1 / e_GBE.shape[2])


FIRST_SEGMENT: dict[str, FirstSegment] = {"own": own, "uniform": uniform}


def shifted(e_GBE: torch.Tensor, first: FirstSegment) -> torch.Tensor:
    """The weights that each segment takes from the previous segment: [G, B, E]."""
    return torch.cat([first(e_GBE), e_GBE[:-1]])


#: By --uoe-norm-of: from x W_g and SiLU(x W_g) * (x W_p) to what the norm of UoE is taken of.
NODES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "activation": lambda gate, activation: activation,
    "silu": lambda gate, activation: F.silu(gate),
    "gate": lambda gate, activation: gate,
}


@dataclass(frozen=True)
class FreeChoices:
    """The free experts of a layer: their outputs are 0, x, and a mixture of x and a vector."""

    num_experts: int  # without them; their columns of the scores follow
    zero: int
    copy: int
    constant: int

    def divided(
        self, experts_TK: torch.Tensor, probs_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which choices are free (bool), and the probs of the free experts, 0 if not chosen."""
        free_TK = experts_TK - self.num_experts + 1  # from 1; 0 collects all others
        number = self.zero + self.copy + self.constant
        probs_TZ = probs_TK.new_zeros(len(experts_TK), 1 + number)
        probs_TZ = probs_TZ.scatter_add(1, free_TK.clamp(min=0), probs_TK)[:, 1:]
        return free_TK > 0, probs_TZ

    def output(
        self,
        x_TD: torch.Tensor,
        probs_TZ: torch.Tensor,
        logits_TCA: torch.Tensor | None,
        v_CD: torch.Tensor | None,
    ) -> torch.Tensor:
        """The sum of prob * output: x, and a_1 x + a_2 v with (a_1, a_2) = softmax(logits)."""
        constants = slice(self.zero + self.copy, None)
        share_T = probs_TZ[:, self.zero : constants.start].sum(1)  # of x
        if logits_TCA is None or v_CD is None:
            return (x_TD * share_T[:, None]).to(x_TD.dtype)
        of_x_TC, of_v_TC = (probs_TZ[:, constants, None] * logits_TCA.softmax(-1)).unbind(-1)
        share_T = share_T + of_x_TC.sum(1)
        constant_TD = of_v_TC.to(v_CD.dtype) @ v_CD
        return (x_TD * share_T[:, None] + constant_TD).to(x_TD.dtype)
