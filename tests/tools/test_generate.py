"""The program: its output, and its errors for wrong flags."""

import json
from functools import partial
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, small_data
from tests.tools.running import RunTool, run_tool_forked
from tools.generate import main

run_forked = partial(run_tool_forked, "generate.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Lory run that has learned to count."""
    folder = tmp_path_factory.mktemp("generated")
    data = small_data(folder)
    data["data_path"] = [folder / "cycle"]
    options = SMALL | data | {"save": folder / "run", "expert_selection": "lory"}
    options |= {"lory_segment_length": 8, "train_iters": 150}
    run_distributed(1, pretrain_here, [options])
    return folder / "run"


@pytest.mark.full
def test_a_model_goes_on(trained: Path, start: RunTool) -> None:
    run = partial(start, "generate.py")
    prompt = "zero one two three four"
    for flags in ([], ["--lory-inference", "segment"]):
        result = run(
            *("--load", trained, "--prompt", prompt, "--tokens", 10, "--temperature", 0), *flags
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith(prompt + " five six")


@pytest.mark.full
def test_several_texts_at_a_time(trained: Path, tmp_path: Path) -> None:
    prompts = ["two three four five", "six", "three four five six seven zero"]
    prompts_file, texts = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    prompts_file.write_text("".join(json.dumps({"text": each}) + "\n" for each in prompts))
    greedy = ("--load", trained, "--temperature", 0, "--stop", " seven")
    done = run_forked(*greedy, "--input", prompts_file, "--output", texts, "--batch-size", 2)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    lines = [json.loads(line) for line in texts.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    assert lines[0]["text"] == " six"
    assert all("seven" not in line["text"] for line in lines)
    # The same one after another.
    done = run_forked(*greedy, "--prompt", *prompts, "--batch-size", 1)
    printed = "\n\n".join(line["prompt"] + line["text"] for line in lines) + "\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
    done = run_forked(*greedy, "--prompt", *prompts, "--no-cache")
    assert done.returncode == 2 and "--no-cache: without a cache each new token" in done.stderr


@pytest.mark.full
def test_a_chat(trained: Path) -> None:
    lines = "zero one two\n/again\nthree four five\n"
    flags = ["--temperature", 0, "--tokens", 3, "--names", "six", "seven"]
    done = run_forked("--load", trained, "--chat", *flags, given=lines)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("six: seven:") == 2 and done.stdout.endswith("six: \n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--load is not set"),
        (["--load", "x"], "--prompt is not set"),
        (["--load", "x", "--prompt", "a", "--temperature", "nan"], "--temperature is nan"),
        (["--load", "x", "--prompt", "a", "--chat"], "--prompt and --chat exclude each other"),
        (["--load", "x", "--chat", "--output", "y"], "--output is for --prompt and --input"),
        (["--load", "x", "--input", "nowhere"], "--input nowhere cannot be read"),
        (["--load", "nowhere", "--prompt", "a"], "--load nowhere: there is no such folder"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    said = capsys.readouterr().err
    assert said.startswith("generate.py: ") and message in said
    assert said.count("\n") == 1
