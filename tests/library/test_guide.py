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
