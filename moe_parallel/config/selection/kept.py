"""What a system keeps for the backward pass and holds as weights, declared for plans.

A rule and its losses are written in PyTorch, which decides what autograd keeps. A plan cannot run
them, so the configuration of a system declares it. tests/plan compares with what autograd keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that the selection in a layer keeps of a micro-batch. Equal ones are one tensor.

    The numbers are bytes: for each token and score (of experts, then of free experts), for each
    slot of a token, and so on.
    """

    name: str
    score: int = 0
    slot: int = 0
    token: int = 0
    column: int = 0  # for each score of the layer, whatever the tokens
    layer: int = 0
    by_sequence: bool = False  # `column` counts for each sequence
    summed: bool = False  # over the ranks that share the micro-batch

    def nbytes(self, tokens: int, slots: int, scores: int, sequences: int) -> int:
        """Its size.

        Args:
            tokens: that a rank routes.
            slots: of all these tokens.
            scores: of a token.
            sequences: of the micro-batch.
        """
        columns = scores * (sequences if self.by_sequence else 1)
        each = self.score * scores + self.token
        return tokens * each + slots * self.slot + columns * self.column + self.layer


SCORES = KeptTensor("scores", score=4)
#: Their softmax, or sigmoids divided by the sum.
PROBABILITIES = KeptTensor("probabilities of all experts", score=4)
#: Of all experts; those of the chosen ones become their probs.
PROBS_OF_ALL = KeptTensor("probs of all experts", score=4)
EXPERTS = KeptTensor("experts of the choices", slot=8)
PROBS = KeptTensor("probs of the choices", slot=4)
#: A loss on the load: the share of each expert and the mean of its probabilities.
LOAD = KeptTensor("shares and means of the loss", column=8, summed=True)
LOAD_OF_SEQUENCES = KeptTensor(
    "shares and means of the loss", column=8, by_sequence=True, summed=True
)
#: The sum of all losses of a layer.
LOSS = KeptTensor("loss", layer=4)


@dataclass(frozen=True)
class Scoring:
    """AoE's scores: the norms of C = x W_down of all n experts."""

    rank: int  # d_low
    gathers_w_down: bool = False
    sends_c: bool = False
    recomputes_scores: bool = True
    recomputes_gate: bool = True
    all_norms_learn: bool = True  # --aoe-gradient full
    joins_norms: bool = False  # experts on the token's rank differentiate the norms
    passes_on_c: bool = True  # C of the choices is not computed again on the token's rank


@dataclass(frozen=True)
class Neurons:
    """UoE's scores: the norms of the routing neurons of all n experts."""

    each: int  # of an expert
    gated: bool = False  # their outputs are multiplied by the probs
    copied: bool = True  # the norms are of a tensor in fp32 that exists for them alone


PlannedScores = Scoring | Neurons


class OwnWeight(NamedTuple):
    """A weight that a layer itself holds, in addition to those of its experts."""

    name: str
    size: int  # in numbers, of all experts
    gathered: bool = False  # divided like the experts' weights; otherwise on every rank
    in_fp32: bool = False  # used in fp32


class Target(NamedTuple):
    """The mean number of experts per token that training aims at."""

    flags: str  # that set it
    mean: float
    at_first: str = ""  # what differs before it is reached
