"""Plain lines into a pipe, a bar on a terminal (a pty), and warnings on separate lines."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from moe_parallel.telemetry.console import PlainConsole, duration, open_console
from tests.telemetry.records import VALIDATION, example_record

ROOT = Path(__file__).resolve().parents[2]

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


def on_a_terminal(script: str) -> str:
    """The output of the script on a terminal of 120 columns, both streams."""
    terminal, process_end = pty.openpty()
    rows_and_columns = struct.pack("HHHH", 24, 120, 0, 0)
    fcntl.ioctl(process_end, termios.TIOCSWINSZ, rows_and_columns)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=process_end, stderr=process_end, cwd=ROOT
    )
    os.close(process_end)
    received = b""
    try:
        while chunk := os.read(terminal, 4096):
            received += chunk
    except OSError:  # on Linux it means that the other end is closed
        pass
    finally:
        os.close(terminal)
    assert process.wait(timeout=60) == 0, received.decode()
    return received.decode()


def visible_lines(received: str) -> list[str]:
    """The lines that remain on the screen: a carriage return restarts the line."""
    lines = []
    for line in received.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.replace("\x1b[A", "").rstrip())
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


def test_a_terminal_gets_a_bar_and_warnings_above_it():
    received = on_a_terminal(SCRIPT)
    assert "\r" in received
    assert "40/40" in received and "loss 4.2500  12,346 tokens/s" in received
    lines = visible_lines(received)
    for message in ("the sky is low", "the sea is high", "saved", "iteration 30/40 | validation"):
        (line,) = [line for line in lines if message in line]
        assert "|#" not in line and "█" not in line, line
    (bar,) = [line for line in lines if "00:00 gone" in line]
    assert "100%" in bar and "40/40" in bar
    assert lines[lines.index(bar) + 1] == "after"


def test_the_bar_of_a_resumed_run_starts_where_the_run_was():
    received = on_a_terminal(SCRIPT)
    assert "10/40" in received
    assert " 0/40" not in received


def test_plain_is_chosen_for_what_is_not_a_terminal(tmp_path):
    with (tmp_path / "log").open("w") as file:
        assert isinstance(open_console(10, stream=file), PlainConsole)


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
    printed = capsys.readouterr().out
    assert "loss nan" in printed and "grad norm nan" in printed and "code nan" in printed


def test_an_evaluation_without_a_training_loss(capsys):
    open_console(100).log({"iteration": 0, "validation": VALIDATION})
    assert capsys.readouterr().out.startswith("iteration   0/100 | validation | code 3.5000")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3723, "1:02:03")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text
