"""What chooses experts in the modeling file, and what else they return, by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import moe_parallel.hf as hf
from moe_parallel.config import make_config
from moe_parallel.hf import modeling_moe_parallel as modeling
from moe_parallel.huggingface.own_model import rule_fields
from moe_parallel.layers.system import system_of
from moe_parallel.selection.tokens import Tokens
from tests.hf.test_modeling_moe_parallel import SHAPE, TOKENS, build

#: Of tokens whose sigmoids or probabilities round to the same numbers, and of exact ties.
HOSTILE = torch.tensor([[18.0, 20, 22, 25], [50, 40, 60, 45], [0, -200, -120, -150], [7, 3, 7, 7]])
GROUPS = {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
SIGMOID = {"moe_router_score_function": "sigmoid"}
BIAS = {"moe_router_enable_expert_bias": True}


@pytest.mark.parametrize("bias", [0.0, 1e-3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        BIAS,
        SIGMOID,
        SIGMOID | BIAS | GROUPS,
        {"expert_selection": "uoe"} | BIAS,
        {"expert_selection": "top_p", "moe_top_p": 0.9},
        {"expert_selection": "expert_choice"},
        {"expert_selection": "relu"},
    ],
    ids=str,
)
def test_an_export_chooses_as_the_run(options, bias):
    """The lists of experts are equal, and not only the sets."""
    selection = make_config(options).selection
    rule, bias_E = system_of(selection).rules(selection).evaluation, None
    if BIAS.items() <= options.items():
        bias_E = bias * torch.tensor([1.0, 0, 0, 1])
        rule = rule.with_bias(bias_E)
    scores = "neurons" if options.get("expert_selection") == "uoe" else "router"
    config = hf.MoeParallelConfig(**SHAPE | rule_fields(selection, 4) | {"scores": scores})
    weights, index = modeling.RULES[config.rule](config, HOSTILE, bias_E)
    choices = rule(HOSTILE, Tokens(1))
    chosen = choices.experts_TK >= 0
    assert torch.equal(index.masked_fill(~chosen, -1), choices.experts_TK)
    torch.testing.assert_close(weights, choices.probs_TK.masked_fill(~chosen, 0))


@pytest.mark.parametrize(
    ("norm_of", "gate_routing"), [("activation", False), ("silu", True), ("gate", True)]
)
@torch.no_grad()
def test_routing_neurons_by_hand(norm_of, gate_routing):
    """A loop over tokens and experts, whose first three neurons compute every token."""
    block = build("neurons", norm_of=norm_of, gate_routing=gate_routing).model.layers[0].mlp
    gate, experts = block.gate, block.experts
    x_TD = torch.randn(6, 16, generator=torch.Generator().manual_seed(2))
    w_in, w_out = gate.neurons_in.view(2, 4, 3, 16), gate.neurons_out.view(16, 4, 3)
    for x, found in zip(x_TD, block(x_TD[None])[0], strict=True):
        hidden = [w_in[0, e] @ x for e in range(4)]
        u = [F.silu(hidden[e]) * (w_in[1, e] @ x) for e in range(4)]
        nodes = {"activation": u, "silu": [F.silu(h) for h in hidden], "gate": hidden}[norm_of]
        norms = torch.stack([node.square().sum().sqrt() for node in nodes])
        chosen = sorted(range(4), key=lambda e: -float(norms[e] + gate.expert_bias[e]))[:2]
        weights = dict(zip(chosen, norms[chosen].softmax(0), strict=True))
        expected = torch.zeros(16)
        for e in range(4):
            expected += w_out[:, e] @ u[e] * (weights.get(e, 1) if gate_routing else 1)
            if e in weights:
                left, right = (experts.gate_up_proj[e] @ x).chunk(2)
                expected += weights[e] * (experts.down_proj[e] @ (F.silu(left) * right))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_free_experts_by_hand():
    """Two experts, then two zero experts, a copy, and a constant expert that mixes 1 : 3."""
    config = hf.MoeParallelConfig(
        **SHAPE | {"num_experts": 2, "hidden_size": 2},
        zero_experts=2,
        copy_experts=1,
        constant_experts=1,
    )
    free = modeling.MoeParallelFreeExperts(config)
    free.w_constant.copy_(torch.tensor([[[0.0, 0.0], [math.log(3), 0.0]]]))  # for x_0 = 1
    free.v_constant.copy_(torch.tensor([[0.0, 8.0]]))
    x = torch.tensor([[1.0, 5.0]] * 4)
    index = torch.tensor([[0, 1], [2, 3], [4, 5], [3, 4]])
    weights = torch.tensor([[0.5, 0.5], [0.6, 0.4], [2 / 3, 1 / 3], [0.75, 0.25]])
    others, kept, y = free(x, index, weights)
    of_x, of_v = torch.tensor([0.0, 0.0, 0.75, 0.25]), torch.tensor([0.0, 0.0, 0.25, 0.0])
    torch.testing.assert_close(y, of_x[:, None] * x + of_v[:, None] * free.v_constant)
    assert kept.tolist() == [[0.5, 0.5], [0, 0], [0, 0], [0, 0]]
    assert others[0].tolist() == [0, 1] and ((others >= 0) & (others < 2)).all()


@pytest.mark.full
def test_what_a_model_in_bf16_keeps_exact(tmp_path):
    for variant, name, dtype in (
        ("hash", "expert_table", torch.int64),
        ("norms, free", "free_scores", torch.float32),
        ("norms, free", "expert_bias", torch.float32),
    ):
        model = build(variant)
        model.save_pretrained(tmp_path / name)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16)
        kept = getattr(loaded.model.layers[0].mlp.gate, name)
        assert loaded.dtype == torch.bfloat16 and kept.dtype == dtype
        assert torch.equal(kept, getattr(model.model.layers[0].mlp.gate, name))
        assert loaded(TOKENS).logits.isfinite().all()
