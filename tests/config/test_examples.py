"""The files in examples/: valid on the ranks that they name, and the recipes of the AoE paper."""

import re
from pathlib import Path

import pytest

from moe_parallel.config import Config, data_parallel_size, parse_command_line, validate

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECIPES = ("moe_732m", "aoe_732m", "moe_4b", "aoe_4b")


def read(name: str) -> Config:
    return parse_command_line(["--config", str(EXAMPLES / f"{name}.yaml")])


def ranks(name: str) -> int:
    """What the file's own comment says, and what its torchrun line starts."""
    text = (EXAMPLES / f"{name}.yaml").read_text()
    (stated,) = re.findall(r"^# Ranks: (\d+)\.", text, re.MULTILINE)
    (per_node,) = re.findall(r"--nproc-per-node (\d+)", text)
    nodes = re.findall(r"--nnodes (\d+)", text) or ["1"]
    assert int(stated) == int(nodes[0]) * int(per_node)
    assert f"--config examples/{name}.yaml" in text
    return int(stated)


@pytest.mark.parametrize("name", RECIPES)
def test_valid_on_the_ranks_that_it_names(name: str) -> None:
    validate(read(name), ranks(name))


def test_the_quickstart_is_valid_on_two_ranks() -> None:
    validate(read("quickstart"), 2)


@pytest.mark.parametrize("name", RECIPES)
def test_training_is_the_papers(name: str) -> None:
    config = read(name)
    training, optimizer = config.training, config.optimizer
    batch = training.global_batch_size * training.seq_length
    assert round(batch / 1e6, 1) == 4.2
    assert round(batch * training.train_iters / 1e9, 1) == 100.0
    assert optimizer.lr == (3.2e-4 if name.endswith("4b") else 2e-4)
    assert (optimizer.min_lr, optimizer.lr_decay_style) == (1.28e-5, "cosine")
    assert optimizer.lr_warmup_iters == 4800
    assert (optimizer.adam_beta1, optimizer.adam_beta2) == (0.9, 0.95)
    assert (optimizer.clip_grad, optimizer.weight_decay) == (1.0, 0.1)
    assert config.selection.moe_aux_loss_coeff == 0.01
    assert config.selection.moe_router_topk == 2


@pytest.mark.parametrize("name", RECIPES)
def test_the_model_is_the_papers(name: str) -> None:
    config = read(name)
    model = config.model
    shape = (model.num_layers, model.hidden_size, model.num_attention_heads, model.ffn_hidden_size)
    assert shape == ((24, 1280, 20, 5120) if name.endswith("4b") else (12, 768, 12, 3072))
    assert (config.moe.num_experts, config.data.vocab_size) == (8, 32_000)
    assert all(config.moe_layers)
    widths = {"moe_732m": 3072, "moe_4b": 5120, "aoe_732m": 3840, "aoe_4b": 6470}
    assert config.expert_width == widths[name]


@pytest.mark.parametrize("name", RECIPES)
def test_accumulation_is_whole_and_gpus_are_used(name: str) -> None:
    config = read(name)
    dp = data_parallel_size(config, ranks(name))
    assert config.training.global_batch_size % (config.training.micro_batch_size * dp) == 0
    assert config.training.bf16 and config.parallel.use_distributed_optimizer
    assert config.parallel.expert_model_parallel_size == 8


@pytest.mark.parametrize("size", ["732m", "4b"])
def test_the_two_systems_differ_in_the_selection_alone(size: str) -> None:
    def other_lines(name: str) -> set[str]:
        lines = (EXAMPLES / f"{name}.yaml").read_text().splitlines()
        own = ("expert-selection", "moe-z-loss", "aoe-", "save", "#")
        return {line.partition("#")[0].strip() for line in lines if not line.startswith(own)}

    assert other_lines(f"moe_{size}") == other_lines(f"aoe_{size}")
