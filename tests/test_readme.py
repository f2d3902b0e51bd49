"""README: its table names every system, and the commands of "Your own data" work, word for word."""

import re
import sys
from pathlib import Path

import pytest

from moe_parallel.systems import SELECTIONS
from tests.program import give_user, run_as_user

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
    return run_as_user(command, folder)


def test_the_table_names_every_system() -> None:
    table = TEXT.split("## The systems\n")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == sorted(SELECTIONS)


@pytest.mark.full
def test_from_a_folder_of_text_to_a_report(tmp_path: Path) -> None:
    give_user(tmp_path)
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
    assert '"my_text_document"' in (tmp_path / "runs/my/report.html").read_text()
