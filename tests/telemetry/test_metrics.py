"""metrics.jsonl: written at once, cut on resume, readable after an incomplete line, valid JSON."""

import json
import os

import pytest

from moe_parallel.errors import InputError
from moe_parallel.telemetry.metrics import MetricsWriter, has_evaluation, read_metrics


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
    writer = MetricsWriter(tmp_path / "new" / "run")
    for iteration in (1, 2):
        writer.log(record(iteration, layers=[{"layer": 1, "tokens_per_expert": [3, 1]}]))
        lines = (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == iteration
        assert json.loads(lines[-1])["layers"][0]["tokens_per_expert"] == [3, 1]
    writer.close()


def test_resuming_cuts_what_came_after_the_checkpoint(tmp_path):
    write(tmp_path, [10, 20, 30, 40])
    write(tmp_path, [30, 40], resumed_from=20)
    assert iterations_in(tmp_path) == [10, 20, 30, 40]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_resuming_keeps_the_record_of_the_checkpoint_and_values(tmp_path):
    write(tmp_path, [10, 20])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    write(tmp_path, [], resumed_from=20)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_new_run_moves_the_metrics_of_another_aside(tmp_path):
    write(tmp_path, [0, 10])
    write(tmp_path, [0, 5])
    assert iterations_in(tmp_path) == [0, 5]
    assert [r["iteration"] for r in read_metrics(tmp_path / "metrics.previous.jsonl")] == [0, 10]


def test_a_torn_last_line_is_skipped_and_then_repaired(tmp_path):
    write(tmp_path, [10, 20])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 30, "lm_lo')
    assert iterations_in(tmp_path) == [10, 20]
    write(tmp_path, [30], resumed_from=25)
    assert iterations_in(tmp_path) == [10, 20, 30]


def test_a_line_torn_inside_a_character_is_skipped(tmp_path):
    torn = '{"iteration": 2, "validation": {"prosé'.encode()[:-1]
    (tmp_path / "metrics.jsonl").write_bytes(b'{"iteration": 1}\n' + torn)
    assert iterations_in(tmp_path) == [1]


def test_a_line_that_lacks_only_its_end_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 10}\n{"iteration": 20}')
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


def test_an_evaluation_is_found(tmp_path):
    assert not has_evaluation(tmp_path, 10)
    writer = MetricsWriter(tmp_path)
    for number, more in ((10, {}), (20, {"validation": {}})):
        writer.log(record(number, **more))
    assert [has_evaluation(tmp_path, number) for number in (10, 20, 30)] == [False, True, False]
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
        ('{"loss": 1}\n', "line 1 has no `iteration`"),
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


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"metrics\.jsonl: No such file"):
        read_metrics(tmp_path / "metrics.jsonl")
