"""transformers divides the model over ranks by the plan of its configuration."""

from pathlib import Path

import pytest
import torch
from transformers import DistributedConfig

import moe_parallel.hf as hf
from tests.distributed import run_distributed

IDS = [[3, 17, 20, 39, 4, 8, 31]]
STEPS = 6
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "moe_layers": [False, True],
    "shared_expert_intermediate_size": 16,
    "initializer_range": 0.3,
}
VARIANTS = {
    "norms": {"scores": "norms", "low_rank_size": 8},
    "norm per head": {"qk_norm": "head", "attention_bias": True, "tie_word_embeddings": False},
    "norm over all heads": {"qk_norm": "all"},
}


@torch.no_grad()
def answers(model: hf.MoeParallelForCausalLM) -> tuple[torch.Tensor, list[int]]:
    ids = torch.tensor(IDS)
    written = model.generate(ids, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False)
    return model(ids).logits, written[0].tolist()


def answers_of_a_rank(folder: Path) -> tuple[torch.Tensor, list[int], int]:
    model = hf.MoeParallelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_plan="auto")
    ).eval()
    logits, written = answers(model)
    return logits, written, len(model.model.layers[0].self_attn.q_proj.weight.to_local())


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_compute_what_one_computes(variant: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = hf.MoeParallelForCausalLM(hf.MoeParallelConfig(**SHAPE | VARIANTS[variant])).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms whose elements differ
            parameter.data = 1 + 0.3 * torch.arange(len(parameter)).sin()
    model.save_pretrained(tmp_path)
    assert "tp_plan" not in (tmp_path / "config.json").read_text()
    logits, written = answers(model)
    for theirs, texts, rows in run_distributed(2, answers_of_a_rank, tmp_path):
        assert rows == 16  # of 32, those of two of four heads
        torch.testing.assert_close(theirs, logits, rtol=0, atol=1e-5 * logits.abs().max().item())
        assert texts == written


def test_the_plan_of_a_configuration_leaves_that_of_others_alone() -> None:
    everywhere = hf.MoeParallelConfig(qk_norm="all").base_model_tp_plan
    by_head = hf.MoeParallelConfig(qk_norm="head").base_model_tp_plan
    name = "layers.*.self_attn.o_proj"
    assert (everywhere[name], by_head[name]) == ("rowwise_split_input", "rowwise")
