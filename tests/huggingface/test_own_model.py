"""The configuration of our own architecture: the rule of a run's evaluations, or a refusal."""

import pytest

from moe_parallel.config import parse_command_line
from moe_parallel.hf import MoeParallelConfig
from moe_parallel.huggingface.own_model import own_config_json
from tests.program import SMALL, flags
from tests.systems import options


def _fields(of_run):
    return own_config_json(parse_command_line(flags(SMALL | of_run)), 300, fold=False)


@pytest.mark.parametrize(
    ("of_run", "expected"),
    [
        (
            options("topk") | {"moe_router_pre_softmax": True},
            {"scoring_func": "softmax", "norm_topk_prob": False},
        ),
        (
            options("top_p") | {"moe_inference_top_p": 0.3},
            {"rule": "top_p", "moe_top_p": 0.3, "num_experts_per_tok": 4},
        ),
        (
            options("aoe_expert_choice") | {"moe_expert_choice_scores": "raw"},
            {"scores": "norms", "scoring_func": "raw", "norm_topk_prob": False},
        ),
        (
            options("expert_choice") | {"moe_expert_choice_capacity_factor": 2.5},
            {"rule": "topk", "num_experts_per_tok": 3, "shared_expert_gate": True},
        ),
        (
            options("top_p, a moving p") | {"moe_inference_top_p": 0.3},
            {"rule": "top_p", "moe_top_p": 0.3, "norm_topk_prob": True},
        ),
        (
            options("uoe"),
            {"rule": "topk", "scores": "neurons", "routing_neurons": 8, "norm_of": "activation",
             "gate_routing": False, "moe_intermediate_size": 24, "expert_bias": True},
        ),
        (
            options("topk, free experts")
            | {"moe_zero_experts": 2, "moe_zero_expert_gate": "renormalize"},
            {"rule": "topk", "num_experts": 4, "zero_experts": 2, "copy_experts": 1,
             "constant_experts": 1, "zero_expert_gate": "renormalize", "norm_topk_prob": True},
        ),
        (options("aoe, free experts"), {"scores": "norms", "copy_experts": 2, "expert_bias": True}),
        (
            options("top_p") | {"moe_copy_experts": 3},
            {"rule": "top_p", "num_experts": 4, "num_experts_per_tok": 7, "copy_experts": 3},
        ),
        (options("lory_prefix"), {"rule": "merge", "prefix_length": 3}),
    ],
)  # fmt: skip
def test_the_rule_of_evaluations(of_run, expected):
    fields = _fields(of_run)
    assert {name: fields.get(name) for name in expected} == expected
    known = {*MoeParallelConfig().to_dict(), "auto_map"}
    assert fields.keys() <= known  # a field that is not known would have no effect
