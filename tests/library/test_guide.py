"""The code of docs/library.md runs unchanged, and its model learns."""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

GUIDE = (Path(__file__).parents[2] / "docs" / "library.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
AOE = re.search(r"self\.moe = AoE\(.*\)", BLOCKS[0])
ROUTED = re.search(r"^    (self\.moe = RoutedMoE\(.*\))$", GUIDE, re.MULTILINE)


def run(*blocks: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/library.md", "exec"), names)
    return names


def test_the_whole_page(capsys: pytest.CaptureFixture[str]) -> None:
    losses = run(*BLOCKS)["losses"]
    assert losses[0] == pytest.approx(5.7, abs=0.4)  # ln 256 = 5.5
    assert sum(losses[-10:]) / 10 < 2.9
    printed = capsys.readouterr().out
    assert "blocks.0.moe [" in printed and "blocks.1.moe [" in printed
    assert "torch.Size([2, 5, 64]) torch.Size([10, 64])" in printed


def test_a_router_instead() -> None:
    assert AOE and ROUTED
    routed = BLOCKS[0].replace(AOE[0], ROUTED[1]).replace("import AoE", "import RoutedMoE")
    losses = run(routed.replace("range(100)", "range(40)"))["losses"]
    assert sum(losses[-10:]) / 10 < losses[0] - 2


def test_experts_of_a_model_of_transformers(tmp_path: Path) -> None:
    """The passage on transformers, for a small model on disk instead of a large one of the hub."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 60}
    small = OlmoeForCausalLM(OlmoeConfig(**sizes, **heads, num_experts_per_tok=2, eos_token_id=1))
    small.save_pretrained(tmp_path)
    passage = GUIDE.split("## The experts of transformers' models")[1].split("## ")[0]
    code = textwrap.dedent("".join(re.findall(r"^    .*\n|^\n", passage, re.MULTILINE)))
    model = run(code.replace("allenai/OLMoE-1B-7B-0924", str(tmp_path)))["model"]
    assert model.config._experts_implementation == "moe_parallel"
    tokens = torch.arange(50).view(2, 25)
    small.set_experts_implementation("eager")
    losses = [each(input_ids=tokens, labels=tokens).loss for each in (model, small)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    for loss in losses:
        loss.backward()
    for ours, wanted in zip(model.parameters(), small.parameters(), strict=True):
        scale = float(wanted.grad.abs().max())
        torch.testing.assert_close(ours.grad, wanted.grad, rtol=1e-5, atol=1e-5 * scale)


def test_weights_of_a_training_model() -> None:
    """The passage on weights, for a model with initial weights instead of those of a run."""
    passage = GUIDE.split("## Weights of a training run")[1].split("## Commands")[0]
    code = textwrap.dedent("".join(re.findall(r"^    .*\n|^\n", passage, re.MULTILINE)))
    flags = (
        "--num-layers 1 --hidden-size 32 --num-experts 4 --expert-selection aoe --vocab-size 300"
    )
    names = run(code.replace('[], load="runs/my"', repr(flags.split())))
    x = torch.randn(5, 2, 32)
    trained = names["gpt"].decoder.layers[0].mlp(x)[0]
    torch.testing.assert_close(names["moe"](x), trained, rtol=1e-6, atol=1e-9)
