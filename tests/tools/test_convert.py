"""The program: its table, its exit codes and its errors for wrong flags."""

import json
from functools import partial
from pathlib import Path

import pytest

from moe_parallel.config import make_config
from moe_parallel.data.sealed import write_sealed
from moe_parallel.training.checkpoint.folder import RECORD
from moe_parallel.training.checkpoint.record import FORMAT, describe_files
from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, small_data
from tests.tools.running import RunTool, run_tool_forked

run_forked = partial(run_tool_forked, "convert.py")


def test_a_model_is_converted_and_reported(tmp_path: Path, start: RunTool) -> None:
    run = partial(start, "convert.py")
    options = SMALL | small_data(tmp_path) | {"save": tmp_path / "moe", "moe_z_loss_coeff": 1e-3}
    run_distributed(1, pretrain_here, [options])
    new = tmp_path / "aoe"
    line = ["--to", "aoe", "--load", tmp_path / "moe", "--save", new]
    flags = ["--aoe-low-rank-size", 8, "--train-iters", 9, "--calibration-samples", 12]
    result = run(*line, *flags)
    assert (result.returncode, result.stderr) == (0, "")
    printed = result.stdout.splitlines()
    assert printed[0] == "--moe-z-loss-coeff 0.001: left out, aoe has no such option"
    assert "(choices at random: 0.500)" in printed
    report = json.loads((new / "conversion.json").read_text())
    assert report["calibration"] == {"fitted_tokens": 12 * 32, "held_out_tokens": 4 * 32}
    for number, layer in enumerate(report["layers"], start=1):
        (row,) = [words for words in map(str.split, printed) if words[:1] == [str(number)]]
        expected = [layer["after"], layer["before"]]
        assert [float(word) for word in row[1:3]] == pytest.approx(expected, abs=5e-4)
    for domain in ("cycle", "noise"):
        (row,) = [words for words in map(str.split, printed) if words[:1] == [domain]]
        losses = report["loss"][domain]
        expected = [losses["source"], losses["converted"]]
        assert [float(word) for word in row[1:]] == pytest.approx(expected, abs=5e-5)
    assert "train-iters: 9" in (new / "config.yaml").read_text()
    again = run(*line, *flags)
    assert again.returncode == 2
    assert "already contains a run" in again.stderr


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder that has the configuration and the record of a checkpoint, and nothing else."""
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    (folder / "config.yaml").write_text(make_config({"num_experts": 4}).to_yaml())
    record = {
        "format": FORMAT,
        "training": {"iteration": 1, "consumed_samples": 1, "consumed_tokens": 1},
        "layout": {},
        "fingerprint": {},
        "files": describe_files(folder, ["config.yaml"]),
    }
    write_sealed(folder / RECORD, record)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "dense"], "--to is dense: it takes one of aoe, topk"),
        (["--to", "aoe", "--save", "x"], "--load is not set"),
        (["--to", "aoe", "--load", "nowhere", "--save", "x"], "nowhere: there is no such folder"),
    ],
)
def test_wrong_flags_are_one_line_and_code_2(arguments: list[str], message: str) -> None:
    result = run_forked(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("convert.py: ")
    assert message in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hidden-size", "32"], "--hidden-size is 32, but 256 in --load: leave it out"),
        (["--aoe-low-rank-size", "999"], "--aoe-low-rank-size is 999, but W_g of --load is 256 x"),
        (["--train-iters", "9", "--lr-warmup-iters", "9"], "--lr-warmup-iters is 9: it must be be"),
        (["--aoe-gradient", "selected"], "--aoe-gradient is selected, but --moe-aux-loss"),
    ],
)
def test_what_does_not_fit_the_model(checkpoint: Path, flags: list[str], message: str) -> None:
    result = run_forked("--to", "aoe", "--load", checkpoint, "--save", checkpoint / "new", *flags)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert message in line
