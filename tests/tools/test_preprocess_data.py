"""The program: its output, and its exit for a line that it cannot use, a signal, a full disk."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.data.small_text import small_bpe, words
from tests.tools.running import ROOT, run_tool, run_tool_forked

run = partial(run_tool, "preprocess_data.py")
run_forked = partial(run_tool_forked, "preprocess_data.py")


def write(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_threads_change_nothing_and_a_bad_line_is_one_line(tmp_path: Path) -> None:
    small_bpe().save(tmp_path / "tokenizer")
    source = write(tmp_path / "in.jsonl", *(words(200, i) for i in range(60)))
    line = ["--input", source, "--tokenizer-model", tmp_path / "tokenizer", "--output-prefix"]
    for workers in (1, 3):
        result = run(*line, tmp_path / f"{workers}" / "my", "--workers", workers)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith(f"{tmp_path}/{workers}/my_text_document: 60 documents, ")
    one, three = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("1", "3")
    )
    assert one == three and len(one) == 3
    with source.open("a") as stream:
        stream.write("{\n")
    result = run_forked(*line, tmp_path / "bad" / "my")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: --input {source} line 61: not JSON (Expecting property name enclosed in double "
        "quotes, column 2); --max-bad N leaves up to N bad records out\n"
    )
    assert not list((tmp_path / "bad").iterdir())


class Reading:
    """The program in its own session while it waits for more input from a pipe."""

    def __init__(self, folder: Path, *more: object) -> None:
        small_bpe().save(folder / "tokenizer")
        self.out = folder / "out"
        line = [
            sys.executable, "tools/preprocess_data.py", "--input", "/dev/stdin",
            "--output-prefix", self.out / "my", "--tokenizer-model", folder / "tokenizer", *more,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [str(word) for word in line],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        record = json.dumps({"text": words(2000, 1)}) + "\n"
        for _ in range(300):  # several batches
            self.process.stdin.write(record.encode())
        self.process.stdin.flush()
        until(lambda: any(path.stat().st_size for path in self.out.glob(".*/*.bin")))

    def end(self) -> tuple[int, str]:
        """The exit code and what was printed."""
        _, error = self.process.communicate(timeout=60)
        return self.process.returncode, error.decode()


def until(happened, seconds: float = 60) -> None:
    """Waits until something is true."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    reading = Reading(tmp_path)
    os.killpg(reading.process.pid, number)  # as a terminal does, to all processes
    assert reading.end() == (130, "error: interrupted; nothing was written\n")
    assert list(reading.out.iterdir()) == []


# Prints the most memory that the program had, in kB. getrusage would count that of its parent.
MEASURED = """
import re, runpy, sys
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("peak", re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


def peak_memory(folder: Path, record: str, count: int) -> int:
    """The most bytes that the program has in memory for `count` equal records."""
    source = folder / f"{count}.jsonl"
    source.write_text(record * count)
    line = [
        "tools/preprocess_data.py", "--input", source, "--output-prefix", folder / "out",
        "--tokenizer-model", folder / "tokenizer", "--append-eod", "--overwrite",
    ]  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv = {[str(word) for word in line]}{MEASURED}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return int(result.stdout.split("peak ")[1]) * 1024


@pytest.mark.full
@pytest.mark.parametrize(
    ("record", "few", "many"),
    [
        (json.dumps({"text": "the expert", "more": "x" * 10_000}) + "\n", 800, 6_400),
        ('{"text": "a"}\n', 120_000, 300_000),
    ],
    ids=["bytes", "documents"],
)
def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, record: str, few: int, many: int
) -> None:
    small_bpe().save(tmp_path / "tokenizer")
    # 56 MB more to read, or 180,000 documents more, for which Megatron's builder needs 20 MB.
    growth = peak_memory(tmp_path, record, many) - peak_memory(tmp_path, record, few)
    assert growth < 10 * 2**20
