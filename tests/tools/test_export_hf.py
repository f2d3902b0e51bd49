"""The program as a user runs it: what it writes and says, and its errors for wrong input."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.distributed import run_distributed
from tests.huggingface.exporting import save_runs
from tests.program import SMALL, pretrain_here, small_data
from tests.systems import options
from tests.tools.running import RunTool
from tools.export_hf import main

RUNS = {
    "aoe": options("aoe"),
    "topk": options("topk"),
    "smear": options("smear"),
    "uniform": options("lory_prefix") | {"lory_first_segment": "uniform"},
    "forced": options("topk") | {"moe_router_force_load_balancing": True},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_distributed(1, save_runs, [(folder / name, of_run) for name, of_run in RUNS.items()])
    return folder


def test_a_trained_run(tmp_path: Path, start: RunTool) -> None:
    of_run = SMALL | small_data(tmp_path) | options("aoe") | {"save": tmp_path / "run"}
    run_distributed(1, pretrain_here, [of_run])
    output = tmp_path / "exported" / "counting"
    done = start("export_hf.py", "--load", tmp_path / "run", "--output", output, "--fold")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("A token's output depends on this token and earlier ones.\n")
    assert f"saved {output}: MoeParallelForCausalLM, " in done.stdout
    assert sorted(path.name for path in output.iterdir()) == [
        "README.md",
        "config.json",
        "configuration_moe_parallel.py",
        "generation_config.json",
        "model.safetensors",
        "modeling_moe_parallel.py",
        "rules_moe_parallel.py",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [path.name for path in output.parent.iterdir()] == ["counting"]
    card = (output / "README.md").read_text()
    (last,) = [
        record["validation"]
        for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        if (record := json.loads(line))["iteration"] == 4 and "validation" in record
    ]
    for domain in ("cycle", "noise"):
        row = f"| {domain} | {last[domain]['loss']:.4f} | {last[domain]['bits_per_byte']:.4f} |"
        assert row in card.splitlines()
    assert "| trained for | 4 iterations, 1,024 tokens |" in card
    assert "| experts of a layer | 4, of width 20; W_g multiplied out, of width 32 |" in card


WITHOUT_THE_PACKAGE = """
import sys
sys.modules["moe_parallel"] = None  # as if it were not installed
import torch
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=False)
except ValueError as error:
    print("trust_remote_code=True" in str(error))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(model(torch.tensor([[1, 2, 3]])).logits.argmax(-1).tolist())
"""


@pytest.mark.full
def test_the_code_beside_the_weights_needs_no_package(runs: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    import moe_parallel.hf  # noqa: F401

    output = tmp_path / "out"
    assert main(["--load", str(runs / "aoe"), "--output", str(output)]) == 0
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_PACKAGE, output],
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    model = AutoModelForCausalLM.from_pretrained(output)
    expected = model(torch.tensor([[1, 2, 3]])).logits.argmax(-1).tolist()
    assert done.stdout.splitlines() == ["True", str(expected)], done.stderr


@pytest.mark.parametrize(
    ("run", "flags", "message"),
    [
        (None, [], "--load is not set"),
        ("aoe", [], "--output is not set: name a new folder"),
        ("aoe", ["--output", "FULL"], "FULL already exists: name a new folder"),
        ("aoe", ["--output", "OUT", "--dtype", "fp8"], "--dtype is fp8: use auto, float32 or bf"),
        (
            "aoe",
            ["--output", "OUT", "--architecture", "MixtralForCausalLM"],
            "MixtralForCausalLM, which has no --expert-selection aoe: use auto",
        ),
        ("topk", ["--output", "OUT", "--fold"], "--fold: W_g of the run's experts is one matrix"),
        (
            "aoe",
            ["--output", "OUT", "--fold", "--architecture", "MixtralForCausalLM"],
            "--fold is for own alone",
        ),
        ("smear", ["--output", "OUT"], "--expert-selection smear has no form in transformers"),
        ("uniform", ["--output", "OUT"], "--lory-first-segment is uniform, which an export of"),
        ("forced", ["--output", "OUT"], "its experts are forced (in turn), so it is a benchmark"),
        ("aoe", ["--output", "/sys/out"], "--output /sys/out cannot be written ("),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    run: str | None,
    flags: list[str],
    message: str,
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL/file").touch()
    before = sorted(tmp_path.rglob("*"))
    places = {"OUT": str(tmp_path / "OUT"), "FULL": str(tmp_path / "FULL")}
    line = [places.get(word, word) for word in flags]
    assert main(([] if run is None else ["--load", str(runs / run)]) + line) == 2
    said = capsys.readouterr().err
    assert said.startswith("export_hf.py: ") and message in said, said
    assert said.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


Change = Callable[[Path], None]


def _bias(checkpoint: Path) -> None:
    _rewrite(checkpoint, "enable-expert-bias: false", "enable-expert-bias: true")


def _rewrite(checkpoint: Path, old: str, new: str) -> None:
    """Change config.yaml, and the record of its content, as a careful user might."""
    from moe_parallel.data.sealed import write_sealed
    from moe_parallel.reading import parse_json
    from moe_parallel.training.checkpoint.record import describe_files

    path = checkpoint / "config.yaml"
    text = path.read_text()
    assert old in text, text
    path.write_text(text.replace(old, new))
    record = parse_json((checkpoint / "checkpoint.json").read_bytes())
    record.pop("checksum")
    record["files"] |= describe_files(checkpoint, ["config.yaml"])
    write_sealed(checkpoint / "checkpoint.json", record)


def _flip(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_bias, "decoder.layers.0.mlp.bias.bias_E is missing, which the model of its config.yaml"),
        (_flip, "the checkpoint is incomplete or damaged"),
    ],
)
def test_a_checkpoint_that_is_not_of_its_configuration(
    change: Change, message: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "aoe", run)
    (checkpoint,) = run.glob("iter_*")
    change(checkpoint)
    output = tmp_path / "out"
    assert main(["--load", str(run), "--output", str(output), "--architecture", "own"]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1, said
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
