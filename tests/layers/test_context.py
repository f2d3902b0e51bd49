"""What a layer is given: its capacity, its part of the tokens, and arguments of Megatron-Core."""

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import distributed as dist

from moe_parallel.config import make_config
from moe_parallel.layers.dispatched import SplitTokens, build_capacity
from moe_parallel.layers.system import system_of
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens
from moe_parallel.selection.topk import TopK
from moe_parallel.systems import SELECTIONS, AoESelection
from tests.distributed import run_distributed
from tests.layers.single import EXPERTS, Case, build, values


@pytest.mark.parametrize(
    ("options", "rows"),  # of 64 tokens and 8 experts at factor 1.5
    [
        ({}, 24),  # K = 2
        ({"moe_router_topk": 1}, 12),
        ({"moe_router_topk": 3}, 36),
        ({"moe_capacity_counts_topk": False}, 12),
        ({"moe_capacity_counts_topk": False, "moe_router_topk": 3}, 12),
        ({"expert_selection": "aoe"}, 24),
        ({"expert_selection": "aoe", "moe_capacity_counts_topk": False}, 12),
        # The number of experts per token varies.
        ({"expert_selection": "top_p"}, 12),
        ({"expert_selection": "aoe_top_p"}, 12),
        ({"expert_selection": "expert_choice"}, 12),
        ({"expert_selection": "aoe_expert_choice", "moe_capacity_counts_topk": False}, 12),
    ],
)
def test_rows_of_an_expert(options: dict[str, Any], rows: int) -> None:
    config = make_config({"num_experts": 8, "moe_expert_capacity_factor": 1.5, **options})
    rule = build_capacity(config)
    assert rule is not None
    assert rule.rows_per_expert(64, 8) == rows


def _share():
    """Two sequences of eight tokens on two context-parallel ranks."""
    tokens = SplitTokens(2, dist.group.WORLD, cp_size=2)
    whole = torch.tensor([[b, s] for s in range(8) for b in range(2)])
    mine = tokens.of_this_rank(whole)
    assert torch.equal(tokens.of_micro_batch(mine), whole)
    assert (tokens.num_shares, tokens.num_stretches) == (2, 1)
    return mine[::2, 1].tolist(), tokens.share(len(mine))


def test_context_parallel_ranks_hold_two_chunks():
    assert run_distributed(2, _share) == [
        ([0, 1, 6, 7], [range(2), range(6, 8)]),
        ([2, 3, 4, 5], [range(2, 6)]),
    ]


def _stretch():
    """Two sequences of four tokens, two of each on this rank: rows are (sequence, position)."""
    tokens = SplitTokens(2, dist.group.WORLD)
    whole = torch.tensor([[b, s] for s in range(4) for b in range(2)], dtype=torch.float32)
    mine = tokens.of_this_rank(whole)
    together = tokens.of_micro_batch(mine)
    return mine.tolist(), torch.equal(together, whole), tokens.share(len(mine))


def test_ranks_hold_stretches_of_the_same_sequences():
    (first, whole_0, begin_0), (second, whole_1, begin_1) = run_distributed(2, _stretch)
    assert first == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert second == [[0, 2], [1, 2], [0, 3], [1, 3]]
    assert whole_0 and whole_1
    assert (begin_0, begin_1) == ([range(2)], [range(2, 4)])


#: Megatron-Core gives a feed-forward layer its configuration; `params` of its ModuleSpec follow.
GIVEN = ("config", "selection", "expert_width", "context", "system")
#: Arguments of Megatron-Core 0.19 that 0.16 does not have.
LATER = ("is_mtp_layer", "name")


@pytest.mark.parametrize("word", SELECTIONS)
def test_a_layer_takes_the_arguments_of_later_versions_of_megatron_core(word):
    selection = SELECTIONS[word]()
    layer = system_of(selection).layer.variant(selection)
    inspect.signature(layer).bind(**dict.fromkeys((*GIVEN, *LATER)))


@dataclass(frozen=True)
class Smallest(TopK):
    """The K experts with the lowest score."""

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        return self.of(scores_TE, scores_TE.topk(self.k, dim=1, largest=False).indices)


@pytest.mark.parametrize("gradient", ["full", "selected"])
def test_a_rule_that_is_derived_from_topk_chooses_by_itself(gradient: str) -> None:
    """Layers of AoE let an operator find the greatest norms, but only for TopK itself."""
    k = 2
    selection = AoESelection(
        moe_router_topk=k, moe_aux_loss_coeff=0, aoe_low_rank_size=2, aoe_gradient=gradient
    )
    given = values(Case(selection))
    layer = build(Case(selection), given, torch.float64, "reference")
    layer.rule = Smallest(k)
    x_TD = torch.from_numpy(given["x"]).flatten(0, 1)
    choices = layer.choose(x_TD, Tokens(num_sequences=1))
    norms_TE = torch.einsum("td,edr->ter", x_TD, layer.w_down_EDR).norm(dim=2)
    for chosen, norms in zip(choices.experts_TK.tolist(), norms_TE.tolist(), strict=True):
        assert set(chosen) == set(sorted(range(EXPERTS), key=norms.__getitem__)[:k])
