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


Answers = tuple[torch.Tensor, list[int]]


@torch.no_grad()
def answers(model: hf.MoeParallelForCausalLM) -> Answers:
    ids = torch.tensor(IDS)
    written = model.generate(ids, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False)
    return model(ids).logits, written[0].tolist()


def answers_of_a_rank(folders: list[Path]) -> list[tuple[Answers, int]]:
    """By folder, and the rows of the first layer's W_q that the rank has."""
    found = []
    for folder in folders:
        model = hf.MoeParallelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(tp_plan="auto")
        ).eval()
        rows = len(model.model.layers[0].self_attn.q_proj.weight.to_local())
        found.append((answers(model), rows))
    return found


def save(variant: str, folder: Path) -> Answers:
    torch.manual_seed(2)
    model = hf.MoeParallelForCausalLM(hf.MoeParallelConfig(**SHAPE | VARIANTS[variant])).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms whose elements differ
            parameter.data = 1 + 0.3 * torch.arange(len(parameter)).sin()
    model.save_pretrained(folder)
    assert "tp_plan" not in (folder / "config.json").read_text()
    return answers(model)


@pytest.mark.full
def test_two_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    folders = [tmp_path / variant for variant in VARIANTS]
    on_one = [save(folder.name, folder) for folder in folders]
    for of_rank in run_distributed(2, answers_of_a_rank, folders):
        for ((theirs, texts), rows), (logits, written) in zip(of_rank, on_one, strict=True):
            assert rows == 16  # of 32, those of two of four heads
            tolerance = 1e-5 * logits.abs().max().item()
            torch.testing.assert_close(theirs, logits, rtol=0, atol=tolerance)
            assert texts == written


def test_the_plan_of_a_configuration_leaves_that_of_others_alone() -> None:
    everywhere = hf.MoeParallelConfig(qk_norm="all").base_model_tp_plan
    by_head = hf.MoeParallelConfig(qk_norm="head").base_model_tp_plan
    name = "layers.*.self_attn.o_proj"
    assert (everywhere[name], by_head[name]) == ("rowwise_split_input", "rowwise")
