"""A model in the layout of another: its own layout is then that one."""

from dataclasses import replace

from moe_parallel.config import make_config
from moe_parallel.plan.cluster import parse_cluster
from moe_parallel.plan.layout import layout_of
from moe_parallel.plan.listing import in_layout
from moe_parallel.plan.search import layouts

SIZES = {"num_experts": 4, "global_batch_size": 64, "seq_length": 64}


def test_it_has_every_layout_of_the_other() -> None:
    """The other has twice as many layers, so its virtual stages have twice as many."""
    cluster = parse_cluster("h100x8:2")
    one, other = (make_config(SIZES | {"num_layers": layers}) for layers in (4, 8))
    found = [layout_of(each, cluster.ranks) for each in layouts(one, cluster)]
    assert {layout.virtual for layout in found} == {1, 2}
    for layout in found:
        assert layout_of(in_layout(other, layout), cluster.ranks) == layout


def test_it_computes_the_same_again() -> None:
    modules = ("moe", "layernorm")
    config = make_config(SIZES | {"num_layers": 4})
    layout = replace(layout_of(config, 8), recompute_modules=modules)
    training = in_layout(config, layout).training
    assert training.recompute_granularity == "selective"
    assert tuple(training.recompute_modules) == modules
    assert in_layout(config, replace(layout, recompute_modules=())).training == config.training
