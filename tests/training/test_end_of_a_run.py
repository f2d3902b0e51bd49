"""Finished runs, runs without evaluation, and logs and figures that cannot be written."""

import errno
import json
from unittest import mock

import pytest

from moe_parallel.telemetry.metrics import TIMING, Journal
from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_and_draw, pretrain_here, small_data

# The schedule is explicit, so that fewer iterations do not change it.
RUN = SMALL | {"lr_decay_iters": 4}


def records(save) -> list[dict]:
    lines = (save / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMING} for line in lines]


def files(folder) -> dict[str, tuple[int, bytes]]:
    """Every file except the figure, with the time of its last change and its content."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and path.name != "run.png"
    }


def _train(*runs, train=pretrain_here):
    """(exit code, output) of each run, on one rank."""
    return run_distributed(1, train, runs)[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(options, folder of a run of 4 iterations)."""
    folder = tmp_path_factory.mktemp("finished")
    options = RUN | small_data(folder) | {"tensorboard": True}
    _train(options | {"save": folder / "run"})
    return options, folder / "run"


@pytest.mark.full
def test_an_evaluation_without_training(finished, tmp_path):
    options, save = finished[0], tmp_path / "run"
    _train(options | {"save": save, "save_interval": 4})
    before = files(save)
    logged = [line for line in records(save) if "validation" in line][-1]
    loaded = options | {"load": save, "skip_train": True, "tensorboard": False}
    of_a_file = {"load": save, "skip_train": True, "full_evaluation": True}
    ((code, some), (full_code, full)) = _train(loaded, of_a_file)
    assert (code, full_code) == (0, 0)
    loss = logged["validation"]["cycle"]["loss"]
    assert f"iteration 4/4 | validation | cycle {loss:.4f} nats/token" in some
    assert "held-out text, every token:" in full
    assert "saved" not in some + full
    assert files(save) == before


def test_a_finished_run_is_left_as_it_is(finished, tmp_path):
    options, save = finished
    before = files(save)
    loaded = options | {"load": save}
    fewer, other = {"train_iters": 3}, {"save": tmp_path / "other"}
    (save / "run.png").unlink()
    ends = _train(
        loaded | {"save": save},
        loaded | {"save": save} | fewer,
        loaded | other,
        loaded | other | fewer,
        loaded | {"save": "none"} | fewer,
        train=pretrain_and_draw,
    )
    assert [code for code, _ in ends] == [0] * 5
    lines = [printed.splitlines() for _, printed in ends]
    for printed, iterations in zip(lines, (4, 3, 4, 3, 3), strict=True):
        assert printed[0] == (
            f"--load {save}: 4 iterations are done, and --train-iters is {iterations}: "
            "nothing is left to do"
        )
    assert [printed[1:] for printed in lines] == [[f"figure: {save}/run.png"], [], [], [], []]
    assert (save / "run.png").exists()
    assert files(save) == before
    assert not (tmp_path / "other").exists()


FULL = OSError(errno.ENOSPC, "No space left on device")


def _train_on_a_full_disk(options, records_that_fail):
    """On a rank: the disk is full in these calls of each journal."""
    write, calls = Journal._write_whole, {}

    def write_or_fail(journal, entry):
        calls[journal] = calls.get(journal, -1) + 1
        if calls[journal] in records_that_fail:
            journal._file.write(entry[: len(entry) // 2])
            raise FULL
        write(journal, entry)

    with mock.patch.object(Journal, "_write_whole", write_or_fail):
        return pretrain_here([options])[0]


def test_logs_on_a_full_disk(finished, tmp_path):
    """Training continues; missing entries are written later, or are lost if the run ends first."""
    options, save = finished
    later, lost = tmp_path / "later", tmp_path / "lost"
    for folder, records_that_fail in ((later, range(1, 4)), (lost, range(3, 99))):
        here = options | {"save": folder}
        ((code, printed),) = run_distributed(1, _train_on_a_full_disk, here, records_that_fail)
        assert code == 0
        said = [line for line in printed.splitlines() if "warning: cannot write" in line]
        assert said == [
            f"warning: cannot write {folder}/{name}: No space left on device; training continues"
            for name in ("tensorboard", "metrics.jsonl")
        ]
        assert (folder / "iter_0000004").is_dir()
    assert records(later) == records(save)
    assert records(lost) == records(save)[:3]
