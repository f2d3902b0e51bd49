"""The program: its output for a trained model, and its errors for wrong flags."""

from functools import partial
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, small_data
from tests.tools.running import RunTool, run_tool_forked
from tools.experts_per_vocab_item import main

run_forked = partial(run_tool_forked, "experts_per_vocab_item.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("items")
    options = SMALL | small_data(folder) | {"save": folder / "run", "expert_selection": "top_p"}
    run_distributed(1, pretrain_here, [options])
    return folder / "run"


def test_the_items_of_a_run(trained: Path, start: RunTool) -> None:
    run = partial(start, "experts_per_vocab_item.py")
    result = run("--load", trained, "--at-least", 20)
    assert (result.returncode, result.stderr) == (0, "")
    head, *rows = result.stdout.splitlines()
    assert head.endswith(f"{len(rows)} items occur 20 times or more")
    experts = [float(row.split()[0]) for row in rows]
    assert experts == sorted(experts, reverse=True)
    assert all(1 <= number <= 4 for number in experts)
    assert all(int(row.split()[1].replace(",", "")) >= 20 for row in rows)
    assert len({row.split(maxsplit=2)[2] for row in rows}) == len(rows) > 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--load is not set"),
        (["--load", "x", "--items", "0"], "--items is 0: it must be at least 1"),
        (["--load", "x", "--at-least", "few"], "--at-least: invalid int value"),
        (["--load", "nowhere"], "--load nowhere: there is no such folder"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    said = capsys.readouterr().err
    assert said.startswith("experts_per_vocab_item.py: ") and message in said
    assert said.count("\n") == 1


def test_no_item_is_frequent_enough(trained: Path) -> None:
    result = run_forked("--load", trained, "--samples", 1)
    assert result.returncode == 2 and result.stdout == ""
    assert "--at-least 10000: no item occurs that often" in result.stderr
