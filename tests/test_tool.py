"""The start and the end of a program of tools/."""

import ast
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from moe_parallel.errors import InputError
from moe_parallel.tool import ProgressLines, Tool

TOOLS = Path(__file__).parents[1] / "tools"


def ending(capsys, work, *arguments: str, **options) -> tuple[int, str]:
    """The exit code and stderr of a tool whose only flag is --number."""
    tool = Tool("/somewhere/a_tool.py", "Does a thing.", **options)
    tool.add_argument("--number", type=int, default=0)
    code = tool.run(list(arguments), work)
    printed = capsys.readouterr()
    assert printed.out == ""
    return code, printed.err


def raises(error: BaseException):
    def work(own: Namespace) -> None:
        raise error

    return work


def test_the_work_says_how_it_ended(capsys):
    assert ending(capsys, lambda own: None) == (0, "")
    assert ending(capsys, lambda own: own.number, "--number", "3") == (3, "")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("--number is 7: choose another"), 2, "--number is 7: choose another"),
        (OSError(28, "No space left on device", "x.bin"), 2, "x.bin: No space left on device"),
        (OSError("odd"), 2, "writing: odd"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_ends_it_is_told_in_a_line(capsys, error, code, said):
    assert ending(capsys, raises(error)) == (code, f"a_tool.py: {said}\n")


@pytest.mark.parametrize("arguments", [["--number", "x"], ["--unknown"]])
def test_a_wrong_flag_is_told_in_a_line(capsys, arguments):
    code, said = ending(capsys, lambda own: None, *arguments)
    assert code == 2 and said.startswith("a_tool.py: ") and said.endswith("lists all flags\n")


def test_flags_of_training_are_handed_on():
    tool = Tool("a_tool.py", None)
    tool.add_argument("--load")
    seen = []
    line = ["--load", "x", "--num_layers=2"]
    assert tool.run_with_training_flags(line, lambda *given: seen.append(given)) == 0
    assert seen == [(Namespace(load="x"), ["--num-layers=2"])]


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--loa", "load"),  # no abbreviation
        ("--max-new-tokens", "tokens"),  # as in transformers
        ("--max-gen-toks", "tokens"),  # as in lm-evaluation-harness
        ("--moe-top-k", "moe-router-topk"),  # of training
    ],
)
def test_a_flag_that_a_tool_does_not_have(capsys, flag, meant):
    tool = Tool("a_tool.py", None)
    tool.add_argument("--load")
    tool.add_argument("--tokens", help="max. number of new tokens")
    line = [flag, "1"]
    assert tool.run_with_training_flags(line, lambda *given: None) == 2
    said = f"a_tool.py: {flag} is not a flag of this program: did you mean --{meant}?\n"
    assert capsys.readouterr().err == said


def test_training_flags_of_the_launcher_are_refused(capsys):
    tool = Tool("a_tool.py", None)
    assert tool.run_with_training_flags(["--nproc-per-node=2"], lambda *given: None) == 2
    assert "--nproc-per-node starts ranks, which this program does not" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error():
    source = (
        "import sys; from moe_parallel.tool import Tool\n"
        "def work(own):\n    while True: print('line')\n"
        "sys.exit(Tool('a_tool.py', None).run([], work))"
    )
    command = [sys.executable, "-c", source]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=TOOLS.parent, **pipes) as process:
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert (process.wait(timeout=120), process.stderr.read()) == (141, "")


def test_a_log_gets_a_line_every_30_seconds(capsys):
    times = iter((100.0, 101.0, 129.9, 130.0, 131.0, 160.0))
    advance = ProgressLines("reading", 8_000_000_000, "B", clock=lambda: next(times))
    for _ in range(5):
        advance(600_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 1.80GB of 8.00GB (22%), 60.0MB/s, 01:43 left",
        "reading: 3.00GB of 8.00GB (38%), 50.0MB/s, 01:40 left",
    ]


PROGRAMS = [path for path in sorted(TOOLS.rglob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_every_program_is_a_tool(program):
    names = {node.id for node in ast.walk(ast.parse(program.read_text())) if hasattr(node, "id")}
    assert "Tool" in names and not names & {"ArgumentParser", "OneLineParser"}
