"""The program: its output, its exit codes and its errors for wrong flags."""

import json
from functools import partial

import pytest

from tests.tools.running import run_tool

run = partial(run_tool, "plan.py")
AOE_4B = ("--config", "examples/papers/aoe/aoe_4b.yaml", "--cluster", "h100x8:4")


def test_the_own_layout_as_json() -> None:
    result = run(*AOE_4B, "--own-layout", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    (plan,) = found["plans"]
    assert found["cluster"]["gpus"] == 32
    assert (plan["layout"]["ep"], plan["layout"]["dp"], plan["layout"]["edp"]) == (8, 32, 4)
    assert plan["stages"][0]["weights"] == plan["memory"]["weights"]
    kinds = {message["kind"] for message in plan["messages"]}
    assert kinds == {"all-to-all", "reduce-scatter", "all-gather"}
    assert sum(plan["seconds_by_part"].values()) == pytest.approx(plan["seconds"])


def test_the_table() -> None:
    small = ("--num-layers", "2", "--num-experts", "2", "--moe-router-topk", "1")
    result = run(*AOE_4B, *small, "--top", "2")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("4 nodes of h100x8, 32 GPUs; 2048 sequences of 2048 tokens")
    assert "layouts fit" in result.stdout and "sizes that do not divide" in result.stdout


def test_a_number_of_experts_that_training_decides_is_named() -> None:
    relu = "--config examples/systems/relu.yaml --cluster h100x8:1 --vocab-size 512".split()
    relu += ["--own-layout", "--global-batch-size", "64"]
    result = run(*relu)
    assert (result.returncode, result.stderr) == (0, "")
    assert "training decides the number of experts per token: the plan is for 2, at" in (
        result.stdout
    )
    more = run(*relu, "--mean-choices", "3", "--json")
    assert json.loads(more.stdout)["experts_per_token"] == 3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--cluster is not set: give nodes and their number, as in h100x8:64"),
        (("--cluster", "x:1"), "--cluster x:1: 'x' is not known"),
        (("--cluster", "h100x8:1", "--reserve-gib", "nan"), "--reserve-gib is nan"),
        (("--cluster", "h100x8:1", "--data-path", "x"), "--vocab-size is not set"),
        ((*AOE_4B, "--own-layout", "--global-batch-size", "5"), "the layout is not possible: --gl"),
        ((*AOE_4B, "--beside", "none.yaml"), "--beside is gone: plan the other file by itself"),
        ((*AOE_4B, "--mean-choices", "2"), "the configuration says how many experts a token has"),
        ((*AOE_4B, "--expert-selection", "top_p"), "--expert-selection is top_p"),
    ],
)
def test_wrong_flags_are_told_in_a_line(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert message in result.stderr and result.stderr.count("\n") == 1
