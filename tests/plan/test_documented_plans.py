"""The plans of docs/papers.md and docs/scaling.md are what the planner gives today."""

import json
from pathlib import Path

import pytest

from tests.tools.running import ROOT, run_tool_forked

OWN = (
    "--own-layout", "--overlap-grad-reduce", "true", "--overlap-param-gather", "true",
    "--use-distributed-optimizer", "true", "--json",
)  # fmt: skip
ERC = ("--cluster", "h100x8:4")
ALONE = ("--expert-model-parallel-size", "1", "--micro-batch-size", "2")
EIGHT = ("--cluster", "h100x8:8", "--expert-model-parallel-size", "8", "--micro-batch-size", "2")
NO_EP = ("--expert-model-parallel-size", "1")
FINE = ("--num-experts", "64", "--moe-router-topk", "8", "--ffn-hidden-size", "640")

#: Page, configuration, flags, and cells of the page with the planned tokens/s/GPU or GiB.
CASES = [
    ("papers", "erc/moe_3b", ERC, "| planned tokens/s/GPU | {speed} |"),
    ("papers", "erc/moe_3b", ERC, "| planned GiB a GPU | {gib} | 20.6 | 1.12 |"),
    ("papers", "erc/aoe_3b", ERC, "| planned GiB a GPU | 18.4 | {gib} | 1.12 |"),
    (
        "papers",
        "erc/moe_3b",
        (*ERC, *ALONE),
        "| with ep 1, micro-batch 2: tokens/s/GPU | {speed} |",
    ),
    ("papers", "erc/moe_3b", (*ERC, *ALONE), "| GiB a GPU | {gib} | 21.9 | 0.99 |"),
    ("papers", "erc/aoe_3b", (*ERC, *ALONE), "| {speed} | 1 / 1.76 |"),
    (
        "papers",
        "erc/aoe_3b",
        (*ERC, "--aoe-recompute-scores", "false"),
        "| {speed} | 1 / 1.47 |",
    ),
    ("papers", "erc/erc_3b", ERC, "`erc_3b.yaml` in the same way: {speed} tokens/s/GPU"),
    ("scaling", "aoe/moe_4b", EIGHT, "| MoE, tokens/s/GPU | {speed} | {gib} |"),
    ("scaling", "aoe/moe_4b", (*EIGHT, *FINE), "| 0 / 26.3 | {speed} | {gib} |"),
    *(
        ("scaling", f"aoe/{model}_4b", ("--cluster", f"h100x8:{nodes}", *layout), row)
        for nodes, model, layout, row in (
            (
                8,
                "aoe",
                (*NO_EP, "--micro-batch-size", "16"),
                "| 1, 1, 1, 64 | 16 | {speed} (-10.5%) | 1.10 s | {gib} |",
            ),
            (
                8,
                "moe",
                (*NO_EP, "--micro-batch-size", "8"),
                "| 1, 1, 1, 64 | 8 | {speed} | 0.99 s | {gib} |",
            ),
            (
                32,
                "aoe",
                (*NO_EP, "--micro-batch-size", "8"),
                "| 1, 1, 1, 256 | 8 | {speed} (-11.0%) | 0.29 s | {gib} |",
            ),
            (
                128,
                "aoe",
                ("--micro-batch-size", "2"),
                "| 1, 1, 8, 1024 | 2 | {speed} (-5.9%) | 0.08 s | {gib} |",
            ),
        )
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("page", "file", "flags", "row"), CASES)
def test_the_page_has_the_plan(page: str, file: str, flags: tuple[str, ...], row: str) -> None:
    config = ROOT / "examples" / "papers" / f"{file}.yaml"
    told = run_tool_forked("plan.py", "--config", config, *OWN, *flags)
    assert told.returncode == 0, told.stderr
    (plan,) = json.loads(told.stdout)["plans"]
    text = (Path(ROOT) / "docs" / f"{page}.md").read_text(encoding="utf-8")
    speed = f"{plan['tokens_per_second_and_gpu']:,.0f}"
    assert row.format(speed=speed, gib=f"{plan['memory']['total'] / 2**30:.1f}") in text
