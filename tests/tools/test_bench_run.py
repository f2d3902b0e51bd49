"""The program: its measurements, and its errors for wrong flags."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.bench_rows import read_json
from tests.tools.running import ROOT
from tools.bench.run import main

TOOL = ROOT / "tools" / "bench" / "run.py"


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start the tool like a user: from any folder, without a path to the package."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, str(TOOL), *map(str, arguments)],
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background processes with SIGINT ignored, tests too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.full
def test_a_row_is_printed_and_written(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    process = start("--ops", "permute", "--dtype", "bfloat16", "--turns", 2, "--json", path)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (0, "")
    assert "\npermute forward, T=512 d=128 n=8 K=2, bfloat16   (copy " in out
    assert "\nthreads   1, load " in out
    assert "\n  TE moe_permute: needs a CUDA GPU\n" in out
    about, rows = read_json(path)
    assert [row.timed for row in rows] == ["forward", "backward"]
    assert len(rows[0].ours.samples) == len(rows[0].ceiling.samples) == 2
    assert rows[0].ours.peak_bytes >= (1024 + 512) * 128 * 2  # the rows, and the gradient of x
    assert about["interrupted"] is False
    assert about["threads"] == 1


@pytest.mark.full
def test_an_interruption_keeps_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    process = start("--ops", "permute,unpermute", "--json", path, "--turns", 100_000)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("threads"):
            break
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err == "\ninterrupted after 0 rows\n"
    about, rows = read_json(path)
    assert (about["interrupted"], rows) == (True, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", "permut"], "--ops 'permut' is unknown: choose from routing_map, permute"),
        (["--turns", "many"], "--turns: invalid int value: 'many'"),
        (["--json", "no/folder/a.json"], "--json no/folder/a.json cannot be written there"),
        (["--sizes", "goals", "--ops", "swiglu"], "--ops swiglu: it has no such sizes"),
        (["--tokens", "8"], "--tokens is not a flag of this program"),
    ],
)
def test_wrong_flags_are_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    assert line.startswith("run.py: ")
    assert message in line
