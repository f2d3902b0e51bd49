"""Finished runs of a study on another machine: what travels, and what is refused."""

import io
import signal
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moe_parallel.analysis.study.folder import Cell
from tests.tools.study.fake_runs import FakeRuns, compare, evaluation, write

SECTION = {"selections": ["topk", "aoe"], "seeds": 2, "lr-grid": [1, 3], "pilot-seed": 99}
OPTIONS: dict[str, Any] = {"lr": 3e-3, "min_lr": 3e-4, "study": {**SECTION, "margin": 0.01}}
#: The grid, one step above its better edge, then the runs that are compared.
RUNS = [
    "topk 99 0.003", "aoe 99 0.003", "topk 99 0.009", "aoe 99 0.009", "topk 99 0.027",
    "aoe 99 0.027", "topk 7 0.027", "aoe 7 0.009", "topk 8 0.027", "aoe 8 0.009",
]  # fmt: skip


def train(cell: Cell, stop: Any = None) -> int:
    """topk is the better, the higher the rate; aoe diverges at the highest."""
    (cell.folder / "iter_0000040").mkdir(exist_ok=True)
    (cell.folder / "iter_0000040" / "weights").write_bytes(bytes(100_000))
    if cell.lr is None:
        return write(cell, evaluation(4.0 + cell.seed / 100))
    if cell.contender == "aoe" and cell.lr > 0.01:
        return 3
    return write(cell, evaluation(4.0 - cell.lr))


def stop_after(number: int) -> FakeRuns:
    """Runs that are stopped by a signal during the one after `number`."""

    def act(cell: Cell, stop: Any) -> int:
        if len(runs.ran) <= number:
            return train(cell)
        stop._note(signal.SIGTERM, None)
        (cell.folder / "unfinished").touch()
        return 75

    runs = FakeRuns(act)
    return runs


@pytest.fixture
def archive(tool: ModuleType) -> ModuleType:
    import study_archive

    return study_archive


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """The folders of two machines."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return tmp_path / "one", tmp_path / "two"


def packed(archive: ModuleType, place: Path) -> Path:
    file = place / "study.tar.gz"
    assert archive.main(["pack", str(place / "study"), str(file)]) == 0
    return file


def names(file: Path) -> list[str]:
    with tarfile.open(file) as tar:
        return tar.getnames()


@pytest.mark.parametrize("ended", [1, 5, 6, 8])
def test_another_machine_trains_the_runs_that_are_missing(tool, archive, places, capsys, ended):
    one, two = places
    first = stop_after(ended)
    assert compare(tool, one, first, **OPTIONS) == 75
    assert first.names == RUNS[: ended + 1]
    file = packed(archive, one)
    assert f"{ended} runs that have ended" in capsys.readouterr().out
    assert file.stat().st_size < 20_000  # a checkpoint has 100,000 bytes
    assert not any("iter_" in name for name in names(file))
    assert archive.main(["unpack", str(file), str(two / "study")]) == 0
    assert f"{ended} runs added, 0 were there already" in capsys.readouterr().out

    second = FakeRuns(train)
    assert compare(tool, two, second, **OPTIONS) == 0
    assert second.names == RUNS[ended:]
    whole = FakeRuns(train)
    assert compare(tool, one, whole, **OPTIONS) == 0
    pages = [(place / "study" / "table.md").read_text() for place in (one, two)]
    assert pages[0] == pages[1]


def test_what_is_in_an_archive(tool, archive, places):
    one, _ = places
    assert compare(tool, one, stop_after(7), **OPTIONS) == 75
    found = names(packed(archive, one))
    cell = "cells/topk/seed-7"
    kept = ("metrics.jsonl", "attempts.jsonl", "output.txt")
    assert found[0] == "study.json"
    assert sorted(n for n in found if n.startswith(cell)) == sorted(f"{cell}/{n}" for n in kept)
    assert not any(name.startswith("cells/aoe") for name in found)  # stopped in the midst
    # The pilot run that diverged has no metrics, and is a result.
    assert [n for n in found if n.startswith("pilots/aoe/lr-0.027")] == [
        "pilots/aoe/lr-0.027/attempts.jsonl", "pilots/aoe/lr-0.027/output.txt"
    ]  # fmt: skip


def test_two_machines_meet(tool, archive, places, capsys):
    """Each has trained a seed. A run that one has stopped gives way to the finished one."""
    one, two = places
    assert compare(tool, one, stop_after(6), **OPTIONS) == 75
    assert archive.main(["unpack", str(packed(archive, one)), str(two / "study")]) == 0
    assert compare(tool, one, stop_after(2), **OPTIONS) == 75  # topk 7, aoe 7; topk 8 is stopped
    assert compare(tool, two, FakeRuns(train), "--selections", "topk", **OPTIONS) == 0
    stopped = one / "study" / "cells" / "topk" / "seed-8"
    assert (stopped / "unfinished").exists()
    file = packed(archive, two)
    capsys.readouterr()
    assert archive.main(["unpack", str(file), str(one / "study")]) == 0
    assert "1 runs added, 7 were there already" in capsys.readouterr().out
    assert not (stopped / "unfinished").exists()
    last = FakeRuns(train)
    assert compare(tool, one, last, **OPTIONS) == 0
    assert last.names == ["aoe 8 0.009"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"study": {**SECTION, "margin": 0.5}},
            "the other study has margin 0.01, and this one 0.5",
        ),
        ({"moe_ffn_hidden_size": 64}, "topk with --moe-ffn-hidden-size 32, and this one 64"),
    ],
)
def test_an_archive_of_another_study_is_refused(tool, archive, places, capsys, changes, message):
    one, two = places
    assert compare(tool, one, stop_after(3), **OPTIONS) == 75
    assert compare(tool, two, stop_after(1), **{**OPTIONS, **changes}) == 75
    file, before = packed(archive, one), (two / "study" / "study.json").read_text()
    capsys.readouterr()
    assert archive.main(["unpack", str(file), str(two / "study")]) == 2
    assert message in capsys.readouterr().err
    assert (two / "study" / "study.json").read_text() == before
    assert len(list((two / "study" / "pilots").rglob("metrics.jsonl"))) == 1
    # In a new folder, the command of the other study is what is refused.
    assert archive.main(["unpack", str(file), str(two / "new")]) == 0
    line = ["--config", str(two / "study.yaml"), "--output", str(two / "new")]
    assert tool.main(line) == 2
    assert "--output holds a study of" in capsys.readouterr().err


def test_a_study_at_work_takes_no_archive(tool, archive, places, capsys):
    one, _ = places

    def in_between(cell: Cell, stop: Any) -> int:
        if cell.seed == 8:
            file = packed(archive, one)
            assert archive.main(["unpack", str(file), str(one / "study")]) == 2
            assert "study is in use by another command" in capsys.readouterr().err
        return train(cell)

    assert compare(tool, one, FakeRuns(in_between), **OPTIONS) == 0


def test_nothing_to_pack(tool, archive, places, capsys):
    one, _ = places
    assert archive.main(["pack", str(one / "study"), str(one / "x.tar.gz")]) == 2
    assert "does not contain a study" in capsys.readouterr().err
    assert compare(tool, one, stop_after(0), **OPTIONS) == 75
    assert archive.main(["pack", str(one / "study"), str(one / "x.tar.gz")]) == 2
    assert "has no finished run yet" in capsys.readouterr().err
    assert sorted(path.name for path in one.iterdir()) == ["study", "study.yaml"]


def tar_of(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"cells/topk/../metrics.jsonl": b""}, "has a member 'cells/topk/../metrics.jsonl'"),
        ({"/cells/a/b/metrics.jsonl": b""}, "has a member '/cells/a/b/metrics.jsonl'"),
        ({"cells/topk/seed-7/code.py": b""}, "has a member 'cells/topk/seed-7/code.py'"),
        ({"cells/topk/seed-7/metrics.jsonl": b""}, "has no study.json"),
        ({"study.json": b"{}"}, "study.json cannot be read"),
    ],
)
def test_files_that_are_no_archives(archive, tmp_path, capsys, members, message):
    file = tar_of(tmp_path / "x.tar.gz", members)
    assert archive.main(["unpack", str(file), str(tmp_path / "folder" / "study")]) == 2
    assert message in capsys.readouterr().err
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {"x.tar.gz", ".lock"}
    (tmp_path / "text").write_text("no archive")
    assert archive.main(["unpack", str(tmp_path / "text"), str(tmp_path / "study")]) == 2
    assert "cannot be read" in capsys.readouterr().err
