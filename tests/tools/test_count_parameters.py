"""The program: its output, its exit codes and what it says about wrong flags."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/count_parameters.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_prints_one_json_object_and_nothing_else() -> None:
    result = run("--config", "examples/aoe_732m.yaml", "--moe-backend", "reference")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {
        "total": 732_384_000,
        "active": 222_776_064,
        "active_compute": 236_931_840,
    }


def test_help() -> None:
    result = run("--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "--num-experts" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-expert", "8"], "--num-expert is no flag.*--num-experts"),
        (["--config", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["--num-experts", "2", "--moe-router-topk", "3"], "--moe-router-topk is 3"),
        (["--num-experts", "2"], "--vocab-size is not set"),
    ],
)
def test_wrong_flags_are_one_line_and_code_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("count_parameters.py: ")
    assert re.search(message, line)
