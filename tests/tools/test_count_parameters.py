"""The program: its output, its exit codes and its errors for wrong flags."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from moe_parallel.data.tokenizer import train_byte_bpe
from tests.tools.running import RunTool, run_tool_forked

TOP_P = "--config examples/papers/dynamic/top_p_3.5b.yaml --moe-backend reference".split()
run_forked = partial(run_tool_forked, "count_parameters.py")


def test_prints_one_json_object_and_nothing_else(start: RunTool) -> None:
    model = "--config examples/papers/aoe/aoe_732m.yaml --moe-backend reference".split()
    result = start("count_parameters.py", *model)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {
        "total": 732_384_000,
        "active": 222_776_064,
        "active_compute": 236_931_840,
        # 3 (12 (2 * 4 d d + 2 * 2049 d + 2 * 8 * 256 d + 2 * 2 (256 + 2 d) 3840) + 2 * 32000 d)
        "flops_per_token": 1_534_777_344,
    }


def test_what_only_training_tells_is_null_unless_it_is_given() -> None:
    result = run_forked(*TOP_P)
    assert (result.returncode, result.stderr) == (0, "")
    unknown = dict.fromkeys(("active", "active_compute", "flops_per_token"))
    assert json.loads(result.stdout) == {"total": 3_488_531_456} | unknown
    result = run_forked(*TOP_P, "--experts-per-token", "2")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {
        "total": 3_488_531_456,
        "active": 581_878_784,
        "active_compute": 581_878_784,
        "flops_per_token": 3_596_500_992,
    }


def test_the_vocabulary_is_that_with_which_training_would_begin(tmp_path: Path) -> None:
    def total(*arguments: object) -> int:
        counted = run_forked("--make-vocab-size-divisible-by", 1, *arguments)
        assert counted.stderr == ""
        return json.loads(counted.stdout)["total"]

    assert total() == total("--vocab-size", 4096)  # of the embedded corpus
    train_byte_bpe(["some text"], 258).save(tmp_path)
    assert total("--data-path", "x", "--tokenizer-model", tmp_path) == total("--vocab-size", 258)


DENSE = ["--vocab-size", "100"]
TOP_P_SMALL = [*DENSE, "--num-experts", "4", "--expert-selection", "top_p"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-expert", "8"], "--num-expert is not a flag.*--num-experts"),
        (["--num-experts", "2", "--moe-router-topk", "3"], "--moe-router-topk is 3"),
        ([*TOP_P_SMALL, "--experts-per-token", "nan"], "--experts-per-token is nan.* from 1 to"),
        ([*TOP_P_SMALL, "--experts-per-token", "5"], "--experts-per-token is 5.* --num-experts 4"),
        ([*DENSE, "--experts-per-token", "2"], "--experts-per-token is 2.* dense: leave it out"),
        (
            [*DENSE, "--num-experts", "4", "--experts-per-token", "2"],
            "--experts-per-token is 2.* topk .*leave it out",
        ),
    ],
)
def test_wrong_flags_are_one_line_and_code_2(arguments: list[str], message: str) -> None:
    result = run_forked(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("count_parameters.py: ")
    assert re.search(message, line)
