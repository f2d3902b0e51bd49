"""Lines into a pipe; on a terminal (a pty) a bar below them, and warnings on separate lines."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from moe_parallel.telemetry.console import PlainConsole, open_console
from tests.program import SMALL, flags, small_data
from tests.telemetry.records import VALIDATION, example_record

ROOT = Path(__file__).resolve().parents[2]
ERASE = "\x1b[K"

SCRIPT = """
import logging, sys, warnings
from moe_parallel.telemetry.console import open_console
from tests.telemetry.records import VALIDATION, example_record

console = open_console(40, first=10)
for iteration in range(11, 41):
    console.advance(iteration)
    if iteration % 10 == 0:
        more = {"validation": VALIDATION} if iteration == 30 else {}
        console.log(example_record(iteration, **more))
    if iteration == 15:
        warnings.warn("the sky is low")
    if iteration == 25:
        logging.getLogger("megatron").warning("the sea is high")
console.say("saved")
console.close()
print("after")
"""


def on_a_terminal(
    *arguments: object, columns: int = 120, ctrl_c: bytes = b"", code: int = 0
) -> str:
    """The output of Python with the arguments on a terminal, both streams, until its exit code.

    After the output `ctrl_c` somebody types Ctrl-C.
    """
    terminal, process_end = pty.openpty()
    rows_and_columns = struct.pack("HHHH", 24, columns, 0, 0)
    fcntl.ioctl(process_end, termios.TIOCSWINSZ, rows_and_columns)
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=process_end, stdout=process_end, stderr=process_end, cwd=ROOT,
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(process_end, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(process_end)
    received = b""
    try:
        while chunk := os.read(terminal, 4096):
            received += chunk
            if ctrl_c and ctrl_c in received:
                os.write(terminal, b"\x03")
                ctrl_c = b""
    except OSError:  # on Linux it means that the other end is closed
        pass
    finally:
        os.close(terminal)
    assert process.wait(timeout=60) == code, received.decode()
    return received.decode()


def visible_lines(received: str) -> list[str]:
    """The lines that remain on the screen, if it is wide enough not to break any."""
    lines = []
    for line in received.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = (
                part.removeprefix(ERASE) if part.startswith(ERASE) else part + shown[len(part) :]
            )
        lines.append(shown.rstrip())
    return lines


def test_a_pipe_gets_plain_lines():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert [line.split(" | ")[0] for line in lines] == [
        "iteration 20/40",
        "iteration 30/40",
        "iteration 30/40",
        "iteration 40/40",
        "saved",
        "after",
    ]
    assert "loss 4.2500 | 12,346 tokens/s | grad norm 1.500 | lr 3.00e-04" in (lines[0])
    assert lines[0].endswith(" left")
    assert lines[2].split(" | ")[1:] == [
        "validation",
        "code 3.5000 nats/token, 1.7500 bits/byte",
        "prose 4.5000 nats/token, 2.2500 bits/byte",
    ]
    assert "\r" not in done.stdout and "\x1b" not in done.stdout
    assert "the sky is low" in done.stderr


@pytest.mark.parametrize("columns", [120, 40])
def test_a_terminal_keeps_the_lines_and_shows_a_bar_below_them(columns):
    received = on_a_terminal("-c", SCRIPT, columns=columns)
    lines = visible_lines(received)
    for message in ("the sky is low", "the sea is high"):
        (said,) = [line for line in lines if message in line]
        assert "left" not in said, said
    kept = [line for line in lines if line.startswith(("iteration", "saved", "after"))]
    assert [line.split(" | ")[0] for line in kept] == [
        *("iteration 20/40", "iteration 30/40", "iteration 30/40", "iteration 40/40"),
        *("saved", "after"),  # the bar is gone
    ]
    assert "loss 4.2500 | 12,346 tokens/s | grad norm 1.500 | lr 3.00e-04" in kept[0]
    assert not [line for line in lines if "left" in line and line not in kept]
    bars = [part for part in re.split("[\r\n]", received) if re.match(r" *\d+/40 \|", part)]
    assert "40/40 |██████████| 00:00 left" in bars
    assert "\r10/40" in received and "\r0/40" not in received  # where the resumed run was
    # No more than any terminal has: one that becomes narrower would break it in two.
    assert max(map(len, bars)) <= 40


@pytest.mark.full
def test_the_last_line_after_ctrl_c_is_the_message(tmp_path):
    """Of a launcher and two ranks, which all write to the terminal."""
    run = SMALL | small_data(tmp_path) | {"train_iters": 2000, "save": tmp_path / "run"}
    received = on_a_terminal(
        "pretrain_gpt_moe.py", "--nproc-per-node", 2, *flags(run), ctrl_c=b"iteration   20", code=75
    )
    *lines, saved, stopped, nothing = visible_lines(received)
    assert any(line.startswith("stopping: the run saves") for line in lines)
    assert not [line for line in lines if line.startswith("2") or "^C" in line]
    assert saved.startswith("saved ") and nothing == ""
    assert stopped.startswith("stopped by a signal after iteration")


def test_the_share_of_the_peak_and_the_power_where_they_are_known(capsys):
    console = PlainConsole(40, 0, sys.stdout)
    for machine in ({"mfu": 0.4117, "gpu_watts": 5590.2}, {"tflops_per_device": 1.5}):
        console.log(example_record(machine=machine))
    first, second = capsys.readouterr().out.splitlines()
    assert "tokens/s | MFU 41.2% | 5,590 W | grad norm" in first
    assert "tokens/s | grad norm" in second


def test_a_loss_that_is_not_a_number(capsys):
    open_console(100).log(
        example_record(5, lm_loss=float("nan"), grad_norm=None, validation={"code": {"loss": None}})
    )
    open_console(100).log({"iteration": 0, "validation": VALIDATION})  # without a training loss
    printed = capsys.readouterr().out
    assert "iteration   0/100 | validation | code 3.5000" in printed
    assert "loss nan" in printed and "grad norm nan" in printed and "code nan" in printed
