"""The program: tasks of each type on a trained model, documents, and wrong flags."""

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.program import SMALL, Program, pretrain_here, small_data
from tests.tools.running import ROOT, run_tool_forked
from tools.evaluate import main

run_forked = partial(run_tool_forked, "evaluate.py")
TASKS = ["count_choice", "count_cloze", "count_text", "count_answer"]
FOLDER = ROOT / "tests/harness/tasks"
WORDS = "zero one two three four five six seven eight nine".split()


def _counts(folder: Path, **more: Any) -> Path:
    """A run that has learned to count in a circle."""
    options = SMALL | small_data(folder) | {"save": folder / "run", "train_iters": 120}
    options |= {"data_path": [folder / "cycle"], "eval_iters": 0} | more
    run_distributed(1, pretrain_here, [options])
    return folder / "run"


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _counts(tmp_path_factory.mktemp("evaluated"))


def counted(n: int) -> str:
    return " ".join(WORDS[(n + i) % 8] for i in range(6))


@pytest.mark.full
def test_tasks_of_each_type(counting: Path, tmp_path: Path) -> None:
    texts, output = tmp_path / "texts.jsonl", tmp_path / "found.json"
    texts.write_text("".join(json.dumps({"text": counted(n)}) + "\n" for n in range(8)))
    done = run_forked(
        *("--load", counting, "--tasks", *TASKS, "--include-path", FOLDER),
        *("--documents", "--input", texts, "--stride", 16, "--batch-size", 3, "--output", output),
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(output.read_text())
    results = found["results"]
    assert results["count_choice"]["acc,none"] == 1
    assert results["count_cloze"]["acc,none"] == 1
    assert 1 <= results["count_cloze"]["perplexity,none"] < 1.5
    assert results["count_answer"]["exact_match,first-word"] == 1
    # The harness' windows and ours score the same tokens of a short text.
    bits = found["documents"]["texts"]["bits_per_byte"]
    assert results["count_text"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert found["documents"]["texts"]["bytes"] == sum(len(counted(n)) for n in range(8))
    assert found["documents"]["cycle"]["documents"] == 2
    assert (found["iteration"], found["stride"]) == (120, 16)
    texts_found = found["documents"]["texts"]
    low, high = texts_found["perplexity_interval"]
    nats, margin = texts_found["nats_per_token"], texts_found["nats_per_token_margin"]
    assert texts_found["perplexity"] == pytest.approx(math.exp(nats))
    assert [low, high] == pytest.approx([math.exp(nats - margin), math.exp(nats + margin)])
    assert "count_choice" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("texts")]
    assert f"{bits:.4f} ± {found['documents']['texts']['bits_per_byte_margin']:.4f}" in line


@pytest.mark.full
def test_two_ranks_share_the_work_and_print_once(counting: Path, tmp_path: Path) -> None:
    line = ["--load", counting, "--documents", "--tasks", *TASKS, "--include-path", FOLDER]
    line = [str(word) for word in line]
    with Program(tmp_path, 2, line, script=ROOT / "tools/evaluate.py") as program:
        assert program.finish() == 0, program.output
    alone = run_forked(*line)

    def without_resampling(said: str) -> str:  # by which the harness estimates standard errors
        return re.sub(r"[ -]+", " ", re.sub(r"±  \|[^|]*\|", "", said))  # and its column's width

    assert without_resampling(program.output) == without_resampling(alone.stdout)
    line = ["--load", str(counting), "--documents", "--expert-model-parallel-size", "2"]
    with Program(tmp_path, 2, line, script=ROOT / "tools/evaluate.py") as program:
        assert program.finish() == 0, program.output
    assert program.output in alone.stdout


@pytest.mark.full
def test_bad_input_that_a_rank_finds(counting: Path) -> None:
    line = ["--load", counting, "--tasks", "count_text", "--include-path", FOLDER]
    done = run_forked(*line, "--limit", 1, "--tensor-model-parallel-size", 1)
    assert done.returncode == 0, done.stderr
    done = run_forked("--load", counting, "--documents", "--stride", 33)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "error: --stride is 33, above --seq-length 32: tokens between windows would be left out; "
        "give at most 32\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--load is not set"),
        (["--load", "x"], "--tasks is not set: name tasks, or a --preset"),
        (["--load", "x", "--documents", "--stide", "2"], "--stide is not a flag of this program"),
        (["--load", "x", "--preset", "paper"], "--preset paper is unknown"),
        (["--load", "x", "--tasks", "a", "--shots", "-1"], "--shots is -1: it must be at least 0"),
        (["--load", "x", "--tasks", "a", "--include-path", "y"], "--include-path y: there is no"),
        (["--load", "x", "--input", "y"], "--input y: there is no such file"),
        (["--load", "x", "--documents", "--output", "y/z"], "--output y/z: there is no such"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1
