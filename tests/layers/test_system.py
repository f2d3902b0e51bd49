"""What a layer of any system is given: arguments of every supported Megatron-Core, and its rule."""

import inspect
from dataclasses import dataclass

import pytest
import torch

from moe_parallel.layers.system import system_of
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens
from moe_parallel.selection.topk import TopK
from moe_parallel.systems import SELECTIONS, AoESelection
from tests.layers.single import EXPERTS, Case, build, values

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
