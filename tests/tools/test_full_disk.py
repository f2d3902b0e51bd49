"""A full disk: one line and exit code 2, and nothing under the final name or beside it."""

import json
from pathlib import Path

import pytest

from tests.data.small_text import words
from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, small_data
from tests.systems import options
from tests.tools.running import run_tool_forked

#: A file may have this size: more than what the tools print, and less than what they write.
ROOM = 2_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full_disk")
    of_run = SMALL | small_data(folder) | options("aoe") | {"save": folder / "run"}
    run_distributed(1, pretrain_here, [of_run])
    for number in range(8):
        (folder / f"{number}.jsonl").write_text(json.dumps({"text": words(9, number)}) + "\n")
    prompts = [json.dumps({"text": words(6, number)}) + "\n" for number in range(80)]
    (folder / "prompts.jsonl").write_text("".join(prompts))
    return folder / "run"


#: By tool, the words after it.
LINES = {
    "export_hf.py": ["--load", "RUN", "--output", "OUT"],
    "preprocess_data.py": [
        *("--input", "prompts.jsonl", *(f"{number}.jsonl" for number in range(8))),
        *("--tokenizer-model", "RUN/tokenizer", "--output-prefix", "OUT"),
    ],
    "analyze.py": ["--load", "RUN", "--text", "0.jsonl", "--permutations", 9, "--output", "OUT"],
    "report.py": ["RUN", "--output", "OUT"],
    "generate.py": [
        *("--load", "RUN", "--input", "prompts.jsonl", "--tokens", 2, "--batch-size", 80),
        *("--output", "OUT"),
    ],
    "evaluate.py": [
        *("--load", "RUN", "--input", *(f"{number}.jsonl" for number in range(8))),
        *("--output", "OUT"),
    ],
}


@pytest.mark.full
@pytest.mark.parametrize("tool", LINES)
def test_a_full_disk_leaves_nothing(tool: str, run: Path, tmp_path: Path) -> None:
    line = [
        run.parent / word
        if word.endswith("jsonl")
        else word.replace("RUN", str(run)).replace("OUT", f"{tmp_path}/out")
        for word in map(str, LINES[tool])
    ]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    done = run_tool_forked(tool, *line, file_bytes=ROOM)
    assert done.returncode == 2, done.stderr
    assert str(tmp_path / "out") in done.stderr and "File too large" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    # With room it works.
    done = run_tool_forked(tool, *line)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert any(tmp_path.glob("out*"))
