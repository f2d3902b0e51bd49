"""What Megatron-Core hands a layer of any system, in every version that is supported."""

import inspect

import pytest

from moe_parallel.config import SELECTIONS
from moe_parallel.systems import system_of

#: Megatron-Core gives a feed-forward layer its configuration; `params` of its ModuleSpec follow.
GIVEN = ("config", "selection", "expert_width", "context", "system")
#: Arguments of Megatron-Core 0.19 that 0.16 does not have.
LATER = ("is_mtp_layer", "name")


@pytest.mark.parametrize("word", SELECTIONS)
def test_a_layer_takes_the_arguments_of_later_versions_of_megatron_core(word):
    selection = SELECTIONS[word]()
    layer = system_of(selection).layer.variant(selection)
    inspect.signature(layer).bind(**dict.fromkeys((*GIVEN, *LATER)))
