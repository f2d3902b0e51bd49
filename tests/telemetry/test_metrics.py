"""metrics.jsonl: written at once, cut on resume, readable after an incomplete line, valid JSON."""

import contextlib
import errno
import io
import json
import os
import resource
from unittest import mock

import pytest

from moe_parallel.errors import InputError
from moe_parallel.telemetry.metrics import Journal, MetricsWriter, has_evaluation, read_metrics
from moe_parallel.telemetry.sinks import open_telemetry
from tests.distributed import run_distributed
from tests.telemetry.records import example_record


def record(iteration: int, **more) -> dict:
    return {"iteration": iteration, "lm_loss": 5.0 - iteration / 10, **more}


def write(directory, iterations, **options) -> None:
    writer = MetricsWriter(directory, **options)
    for iteration in iterations:
        writer.log(record(iteration))
    writer.close()


def iterations_in(directory) -> list[int]:
    return [r["iteration"] for r in read_metrics(directory / "metrics.jsonl")]


def test_each_record_is_on_disk_when_log_returns(tmp_path):
    assert not has_evaluation(tmp_path, 1)
    writer = MetricsWriter(tmp_path / "new" / "run")
    for iteration in (1, 2):
        more = {"validation": {}} if iteration == 2 else {}
        writer.log(record(iteration, layers=[{"layer": 1, "tokens_per_expert": [3, 1]}], **more))
        lines = (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == iteration
        assert json.loads(lines[-1])["layers"][0]["tokens_per_expert"] == [3, 1]
        assert has_evaluation(tmp_path / "new" / "run", iteration) == (iteration == 2)
    writer.close()


def test_resuming_cuts_what_came_after_the_checkpoint(tmp_path):
    write(tmp_path, [10, 20, 30, 40])
    write(tmp_path, [30, 40], resumed_from=20)
    assert iterations_in(tmp_path) == [10, 20, 30, 40]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_new_run_moves_the_metrics_of_another_aside(tmp_path):
    write(tmp_path, [0, 10])
    write(tmp_path, [0, 5])
    assert iterations_in(tmp_path) == [0, 5]
    assert [r["iteration"] for r in read_metrics(tmp_path / "metrics.previous.jsonl")] == [0, 10]


def test_a_torn_last_line_is_skipped_and_then_repaired(tmp_path):
    write(tmp_path, [10, 20])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 30, "prosé')
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])  # within a character
    assert iterations_in(tmp_path) == [10, 20]
    write(tmp_path, [30], resumed_from=25)
    assert iterations_in(tmp_path) == [10, 20, 30]
    path.write_text('{"iteration": 10}\n{"iteration": 20}')  # lacks only its end
    write(tmp_path, [30], resumed_from=20)
    assert iterations_in(tmp_path) == [10, 20, 30]


def test_the_cut_needs_no_room_and_tells_what_was_there(tmp_path, monkeypatch):
    write(tmp_path, [10, 20, 30, 40])
    whole = (tmp_path / "metrics.jsonl").read_bytes()

    def full_disk(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    monkeypatch.setattr(os, "replace", full_disk)
    writer = MetricsWriter(tmp_path, resumed_from=20)
    assert whole.startswith((tmp_path / "metrics.jsonl").read_bytes())
    assert iterations_in(tmp_path) == [10, 20]
    assert writer.resumed.last == [record(20)]
    assert writer.resumed.cut == [record(30), record(40)]
    writer.close()


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
    writer = MetricsWriter(tmp_path)
    bad = [float("nan"), float("inf"), -float("inf")]
    writer.log(record(1, grad_norm=bad[0], layers=[{"norm_per_expert": bad}]))
    writer.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse)["grad_norm"] is None
    assert json.loads(line)["layers"][0]["norm_per_expert"] == [None, None, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"iteration": 1}\nnonsense\n{"iteration": 2}\n', "line 2 is damaged"),
        ('{"iteration": 1}\n[1, 2]\n', "line 2 has no `iteration`"),
        ('{"iteration": [1]}\n', "line 1 has no `iteration`"),
        ("[" * 5_000 + "\n", r"line 1 is damaged \(nested too deeply\): delete that line"),
        ('{"iteration": 1, "lm_loss": 1e400}\n', "line 1 is damaged"),
    ],
)
def test_what_is_not_a_metrics_file(tmp_path, text, message):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_metrics(path)
    with pytest.raises(InputError, match=r"metrics\.jsonl: No such file"):
        read_metrics(tmp_path / "none" / "metrics.jsonl")


def entry(number: int) -> bytes:
    return (f"{number:03d}" * 100 + "\n").encode()


def _beyond_the_limit(folder):
    """On a rank: files may not grow beyond 20,000 bytes for a while, as on a full disk. Returns the
    iterations that are in metrics.jsonl then, and the warnings."""
    said = io.StringIO()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.redirect_stdout(said), open_telemetry(folder, 100) as telemetry:
        telemetry.log(example_record(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        for iteration in range(2, 60):
            telemetry.log(example_record(iteration))
            telemetry.sync()
        written = iterations_in(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        telemetry.log(example_record(60))
    return written, [line for line in said.getvalue().splitlines() if "warning" in line]


def test_logs_where_there_is_no_room_for_a_while(tmp_path):
    ((written, warnings),) = run_distributed(1, _beyond_the_limit, tmp_path)
    assert written == list(range(1, len(written) + 1)) and 10 < len(written) < 59
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert records == [example_record(iteration) for iteration in range(1, 61)]
    assert sorted(warnings) == [
        f"warning: cannot write {tmp_path}/{name}: File too large; training continues"
        for name in ("metrics.jsonl", "tensorboard")
    ]


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["full disk", "Ctrl-C"])
def test_half_an_entry_is_removed_before_the_next(tmp_path, error):
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(entry(0))

    def write_half(data):
        journal._file.write(data[: len(data) // 2])
        raise error

    with mock.patch.object(journal, "_write_whole", write_half), pytest.raises(type(error)):
        journal.append(entry(1))
    half = entry(1)[: len(entry(1)) // 2] if isinstance(error, KeyboardInterrupt) else b""
    assert path.read_bytes() == entry(0) + half
    journal.append(entry(2))
    journal.close()
    assert path.read_bytes() == entry(0) + entry(1) + entry(2)


def test_a_console_that_cannot_be_written(tmp_path, capsys):
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    with open("/dev/full", "w") as full, mock.patch("sys.stdout", full):
        with open_telemetry(tmp_path, 100, tensorboard=False) as telemetry:
            for iteration in (1, 2):
                telemetry.advance(iteration)
                telemetry.log(example_record(iteration))
                telemetry.say("saved")
        with pytest.raises(OSError, match="No space left"):
            full.flush()  # the console's unwritten text; the end of the program ignores it
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    assert capsys.readouterr().err == (
        "warning: cannot write standard output: No space left on device; training continues\n"
    )
