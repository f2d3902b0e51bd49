"""The program: its verdicts, its exit codes and its errors for wrong flags."""

import re
from functools import partial
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.program import AOE, SMALL, flags, pretrain_here, small_data
from tests.tools.running import RunTool, run_tool_forked
from tools.probe_causality import main

run_forked = partial(run_tool_forked, "probe_causality.py")


MODEL = flags(SMALL | {"vocab_size": 60, "seq_length": 12})


def test_a_model_that_drops_earlier_tokens_for_later_ones_is_not_causal() -> None:
    result = run_forked(*MODEL, "--moe-expert-capacity-factor", 1, "--perturbations", 99)
    assert (result.returncode, result.stderr) == (1, "")
    opening, *lines = result.stdout.splitlines()
    assert opening == "topk, initial weights: 2 x 12 tokens, 24 perturbed"
    assert [line.split()[0] for line in lines[::3]] == ["training", "evaluation"]
    # 24 places of 2 x 12: 2 * 12 * 11 / 2 pairs inside, 24 * 12 across.
    found = r"NOT CAUSAL: \d+ of 132 .* changed; most: position \d+ of instance [01] changes "
    assert re.search(found, lines[0])
    assert re.search(r"INSTANCES MIX: \d+ of 288 .* position \d+ of instance [01] by ", lines[1])
    assert "rounding: " in lines[2]


@pytest.mark.full
def test_a_checkpoint_of_two_ranks_is_probed_on_one(tmp_path: Path, start: RunTool) -> None:
    run = partial(start, "probe_causality.py")
    options = SMALL | AOE | small_data(tmp_path)
    options |= {"expert_model_parallel_size": 2, "train_iters": 1, "lr_warmup_iters": 0}
    run_distributed(2, pretrain_here, [options | {"save": tmp_path / "run"}])
    result = run("--load", tmp_path / "run", "--seq-length", 12, "--perturbations", 6)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"aoe, {tmp_path / 'run'}: 2 x 12 tokens, 6 perturbed")
    assert result.stdout.count(" causal: 0 of ") == 2
    assert result.stdout.count("instances apart: 0 of 72 ") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--perturbations", "0"], "--perturbations is 0: it must be at least 1"),
        (["--perturbations", "few"], "--perturbations: invalid int value: 'few'; --help lists"),
        (["--load", "nowhere"], "--load nowhere: there is no such folder"),
        (["--num-expert", "4"], "--num-expert is not a flag"),
    ],
)
def test_wrong_flags_are_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    assert line.startswith("probe_causality.py: ")
    assert message in line
