"""README: its table names every system, and the commands of "Your own data" work, word for word."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_parallel.systems import SELECTIONS
from tests.data.small_text import words
from tests.program import environment

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
SECTION = TEXT.split("## Your own data\n")[1].split("\n## ")[0]
BLOCK = re.compile(r"((?:^    [^\n]+\n)+)|^```python\n(.+?)^```$", re.MULTILINE | re.DOTALL)
#: The only word that is another one here: how long the model is trained.
ITERATIONS = ("--train-iters 600", "--train-iters 2")


def run_block(shell: str, python: str, folder: Path) -> str:
    """The output of a block of the section."""
    command = [sys.executable, "-c", python]
    if shell:
        command = ["bash", "-ec", shell.replace(*ITERATIONS)]
    variables = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HF_MODULES_CACHE": str(folder / "modules"),  # the code of an export is copied there
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment() | variables,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{shell or python}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_table_names_every_system() -> None:
    table = TEXT.split("## The systems\n")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == sorted(SELECTIONS)


@pytest.mark.full
def test_from_a_folder_of_text_to_a_report(tmp_path: Path) -> None:
    for name in ("examples", "tools", "pretrain_gpt_moe.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    for number in range(20):
        file = tmp_path / "my_texts" / f"part {number % 3}" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(words(400, number))
    assert SECTION.count(ITERATIONS[0]) == 1
    printed = [run_block(*block, tmp_path) for block in BLOCK.findall(SECTION)]
    data, training, looked, export, generated, report = printed
    assert "data/my_text_document: 20 documents, " in data
    assert "iteration 2/2" in training
    table, _, text = looked.partition("Once upon a time")
    assert "perplexity (95%)" in table and "my_text_document          2" in table and text
    assert "saved exported/my: MoeParallelForCausalLM, " in export
    assert generated.startswith("Once upon a time") and len(generated) > 40
    assert (tmp_path / "runs/my/analysis/selections.parquet").is_file()
    assert "report.html" in report
    assert '"my_text_document"' in (tmp_path / "report.html").read_text()
