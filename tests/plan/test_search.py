"""All layouts of a configuration: which fit, and why others do not."""

import pytest

from moe_parallel.config import make_config
from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import parse_cluster
from moe_parallel.plan.search import Plan, Refused, layouts, plan_layout, reasons, search

OPTIONS = {
    "num_layers": 10,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "ffn_hidden_size": 14336,
    "num_experts": 4,
    "bf16": True,
    "seq_length": 4096,
    "micro_batch_size": 1,
    "global_batch_size": 64,
}
VOCABULARY = 32000
CLUSTER = parse_cluster("h100x8:1")


def test_layouts_are_ranked_and_the_others_have_a_reason() -> None:
    config = make_config(OPTIONS)
    plans, refused = search(config, VOCABULARY, CLUSTER)
    assert 0 < len(plans) + len(refused) <= len(list(layouts(config, CLUSTER)))
    speeds = [plan.time.tokens_per_gpu for plan in plans]
    assert speeds == sorted(speeds, reverse=True) and speeds
    assert len({plan.layout for plan in plans}) == len(plans)
    limit = CLUSTER.node.memory_size - 6 * 2**30
    assert all(plan.memory.total <= limit for plan in plans)
    kinds = reasons(refused)
    assert sum(count for count, _ in kinds.values()) == len(refused)
    assert "GiB, " in kinds["more memory than a GPU has"][1]
    assert "--" in kinds["sizes that do not divide each other"][1]


def test_long_sequences_are_divided() -> None:
    def tried(**options: object) -> set[tuple[int, str | None]]:
        found = layouts(make_config(OPTIONS | options), CLUSTER)
        return {
            (each.parallel.context_parallel_size, each.training.recompute_granularity)
            for each in found
        }

    assert tried() == {(1, None), (1, "full")}
    assert tried(seq_length=16384) == {(cp, way) for cp in (1, 2, 4) for way in (None, "full")}
    selective = {"recompute_granularity": "selective", "recompute_modules": "moe layernorm"}
    assert tried(**selective) == {(1, None), (1, "full"), (1, "selective")}


def test_a_divided_sequence_needs_less_memory() -> None:
    whole, half, again = (
        plan_layout(make_config(OPTIONS | {"num_layers": 2} | each), VOCABULARY, CLUSTER)
        for each in (
            {},
            {"context_parallel_size": 2},
            {"recompute_granularity": "selective", "recompute_modules": "layernorm moe"},
        )
    )
    assert isinstance(whole, Plan) and isinstance(half, Plan) and isinstance(again, Plan)
    assert half.memory.activations < 0.7 * whole.memory.activations
    assert half.time.parts["context parallel"] > 0 and half.layout.dp == 4
    assert again.memory.activations < 0.8 * whole.memory.activations
    assert again.time.seconds > whole.time.seconds


def test_memory_is_refused_by_how_much() -> None:
    config = make_config(OPTIONS | {"num_layers": 2})
    plan = plan_layout(config, VOCABULARY, CLUSTER, reserve=0)
    assert isinstance(plan, Plan)
    one_byte_short = round(CLUSTER.node.memory_size) - plan.memory.total + 1
    refused = plan_layout(config, VOCABULARY, CLUSTER, one_byte_short)
    assert isinstance(refused, Refused) and refused.kind == "more memory than a GPU has"
    assert f"stage 0 needs {plan.memory.total / 2**30:.1f} GiB, 0.0 more" in refused.reason
    assert isinstance(plan_layout(config, VOCABULARY, CLUSTER, one_byte_short - 1), Plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"moe_copy_experts": 2, "moe_aux_loss_coeff": 0.0},
            "--expert-selection is topk, and only training tells how many experts a token has",
        ),
        ({"expert_selection": "top_p"}, "--expert-selection is top_p, and only training tells how"),
    ],
)
def test_what_only_training_tells_is_asked_for(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as told:
        plan_layout(make_config(OPTIONS | options), VOCABULARY, CLUSTER)
    assert str(told.value).startswith(message)


def test_the_mean_number_of_experts_is_given_where_it_varies() -> None:
    config = make_config(OPTIONS | {"expert_selection": "top_p", "expert_model_parallel_size": 4})
    few, many = (
        plan_layout(config, VOCABULARY, CLUSTER, mean_choices=choices) for choices in (1.5, 3.0)
    )
    assert isinstance(few, Plan) and isinstance(many, Plan)
    assert many.time.parts["dispatch"] == pytest.approx(2 * few.time.parts["dispatch"], rel=0.05)
    assert many.memory.activations > few.memory.activations


def test_a_step_as_a_graph_does_not_wait_for_the_host() -> None:
    """Narrow layers, for which the host is the limit."""
    narrow = OPTIONS | {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512}
    graph = narrow | {"cuda_graph_impl": "full_iteration"}
    launched, replayed = (
        plan_layout(make_config(each), VOCABULARY, CLUSTER) for each in (narrow, graph)
    )
    assert isinstance(launched, Plan) and isinstance(replayed, Plan)
    assert launched.time.parts["host"] > 0 and "host" not in replayed.time.parts
    assert replayed.memory.total == launched.memory.total
    plans, refused = search(make_config(graph), VOCABULARY, CLUSTER)
    assert len(plans) + len(refused) == 5  # sizes of a micro-batch
    assert all(plan.layout.dp == plan.layout.ranks for plan in plans)
