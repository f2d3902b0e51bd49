"""Every wrong flag, file and value gives a one-line error, and nothing is overwritten."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moe_parallel.errors import InputError
from moe_parallel.training.pretrain import main
from tests.distributed import run_distributed
from tests.program import AOE, SMALL, Ranks, flags, pretrain_here, small_data


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data, broken data, and a finished run."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "empty").mkdir()
    (folder / "file").write_text("")
    options = SMALL | small_data(folder)
    for broken, name, damage in (
        ("no_index", "idx", Path.unlink),
        ("cut_data", "bin", lambda path: os.truncate(path, 100)),
    ):
        for suffix in ("bin", "idx"):
            shutil.copy(folder / f"cycle.{suffix}", folder / f"{broken}.{suffix}")
        damage(folder / f"{broken}.{name}")
    run = options | small_flags(folder) | {"save": folder / "run", "save_interval": 1}
    run_distributed(2, pretrain_here, [run | {"train_iters": 2, "lr_warmup_iters": 1}])
    shutil.copytree(folder / "run", folder / "torn")
    os.truncate(folder / "torn" / "iter_0000002" / "__1_0.distcp", 100)
    (folder / "wrong_key.yaml").write_text("num-layer: 2\n")
    return folder


#: The commands run on two ranks; `{}` is the folder of `place`.
WRONG = {
    "missing index": (
        {"data_path": "{}/no_index"},
        "--data-path {0}/no_index: .*idx is missing; .*",
    ),
    "truncated data": (
        {"data_path": "{}/cut_data"},
        "--data-path {0}/cut_data: .*bin has 100 bytes but its index describes .*; .*",
    ),
    "foreign ids": (
        {"tokenizer_type": "NullTokenizer", "tokenizer_model": None, "vocab_size": 200},
        "--data-path {0}/cycle was written with another tokenizer than this run's, .*",
    ),
    "missing tokenizer": (
        {"tokenizer_model": "{}/none"},
        "--tokenizer-model {0}/none: there is no file {0}/none; check the path",
    ),
    "small vocabulary": (
        {"vocab_size": 10},
        "--vocab-size is 10, but the tokenizer has 300 tokens: give at least 300 or leave .*",
    ),
    "long sequence": (
        {"seq_length": 100_000},
        "--seq-length 100000 is longer than the data: .*; use a shorter sequence, .*",
    ),
    "empty folder": ({"load": "{}/empty"}, "--load {0}/empty: no checkpoint here .*"),
    "no folder": ({"load": "{}/none"}, "--load {0}/none: there is no such folder; .*"),
    "torn": (
        {"load": "{}/torn/iter_0000002"},
        "--load {0}/torn/iter_0000002: the checkpoint is incomplete or damaged: __1_0.distcp has "
        "100 bytes instead of .*; load another one: iter_0000001",
    ),
    "other sizes": (
        {"load": "{}/run", "hidden_size": 64},
        "--load {0}/run/iter_0000002: --hidden-size is 32 in the checkpoint and 64 here, .*",
    ),
    "a tokenizer for the embedded corpus": (
        {"data_path": None, "tokenizer_model": None, "tokenizer_type": "SentencePieceTokenizer"},
        "--tokenizer-type SentencePieceTokenizer comes with --data-path; .*",
    ),
    "other selection": (
        AOE | {"load": "{}/run"},
        "--load {0}/run/iter_0000002: --expert-selection is topk in the checkpoint and aoe .*",
    ),
    "nothing to start from": (
        {"moe_use_upcycling": True},
        "--moe-use-upcycling starts from a dense checkpoint: name its run by --load",
    ),
    "another run": (
        {"save": "{}/run"},
        "--save {0}/run already contains a run .*: continue it with --load {0}/run, or use "
        "another.*",
    ),
    "save under a file": (
        {"save": "{}/file/run"},
        r"--save {0}/file/run cannot be written \({0}/file/run: Not a directory\): .*",
    ),
    "more than any memory": (
        {"hidden_size": 2**20},
        r"the model, its gradients and optimizer state take [0-9]{3},[0-9]{3}\.. GiB or more on 2 "
        r"ranks, and [0-9.,]+ GiB are free there: lower --num-layers, .*",
    ),
    "save where nobody may": ({"save": "/proc/run"}, r"--save /proc/run cannot be written \(.*"),
}


def _errors(runs):
    """The InputError of each run on this rank."""
    return [_error(options) for options in runs]


def _error(options):
    try:
        pretrain_here([options])
    except InputError as error:
        return str(error)


def _contents(folder):
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes())
        if path.is_file()
        else None
        for path in folder.rglob("*")
        if "cache" not in path.parts and not path.name.endswith(".range.json")
    }


def _at(options, folder):
    return {
        name: value.replace("{}", str(folder)) if isinstance(value, str) else value
        for name, value in options.items()
    }


@pytest.fixture(scope="module")
def messages(place):
    """The errors of two ranks for all of `WRONG`, and the folder before and after."""
    before = _contents(place)
    runs = [SMALL | small_flags(place) | _at(wrong, place) for wrong, _ in WRONG.values()]
    by_rank = run_distributed(2, _errors, runs)
    return dict(zip(WRONG, zip(*by_rank, strict=True), strict=True)), before, _contents(place)


def small_flags(folder):
    return {
        "data_path": folder / "cycle",
        "split": "9,1,0",
        "tokenizer_model": folder / "tokenizer",
        "data_cache_path": folder / "cache",
    }


@pytest.mark.parametrize("name", WRONG)
def test_one_line_says_what_is_wrong(place, messages, name):
    on_0, on_1 = messages[0][name]
    assert on_0 == on_1
    assert on_0 is not None, "no error"
    assert re.fullmatch(WRONG[name][1].replace("{0}", re.escape(str(place))), on_0), on_0


def test_nothing_is_written_over(messages):
    _, before, after = messages
    assert after == before


def _program(folder, options, world_size=2):
    """(exit codes, output) of the program, which should end by itself."""
    with Ranks(folder, world_size, main, flags(options)) as ranks:
        return ranks.finish(), ranks.output


def _error_line(output):
    """The line of an error that was printed once, and without a traceback."""
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("error")]
    return line


def test_what_only_the_first_rank_writes(place, tmp_path):
    save = tmp_path / "run"
    (save / "metrics.jsonl").mkdir(parents=True)
    (save / "metrics.previous.jsonl").mkdir()
    (save / "metrics.previous.jsonl" / "kept").touch()
    codes, output = _program(tmp_path, SMALL | small_flags(place) | {"save": save})
    assert codes == [2, 2]
    assert re.fullmatch(
        rf"error: --save {save}: cannot write the logs \(.*metrics.jsonl: .*\): .*",
        _error_line(output),
    )


@pytest.fixture
def small_disk(tmp_path, place):
    """A disk with room for two checkpoints and a half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    blocks = [path.stat().st_blocks for path in (place / "run" / "iter_0000001").rglob("*")]
    size = int(2.5 * 512 * sum(blocks))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root and the right to mount")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.full
def test_a_disk_that_fills_up_and_one_that_is_read_only(place, tmp_path, small_disk):
    save = small_disk / "run"
    options = SMALL | small_flags(place) | {"save": save, "save_interval": 1}
    codes, output = _program(tmp_path, options)
    assert codes == [2, 2]
    assert re.fullmatch(
        rf"error: --save {save}: cannot write the checkpoint of iteration 4: (.*: )?No space left "
        r"on device; iter_0000002 is untouched; free the disk or name another folder",
        _error_line(output),
    )
    (warning,) = [line for line in output.splitlines() if line.startswith("warning")]
    assert re.fullmatch(
        rf"warning: --save {save}: cannot write the checkpoint of iteration 3: (.*: )?No space "
        r"left on device; iter_0000002 is untouched; free the disk or name another folder; "
        r"training continues without it",
        warning,
    )
    assert not list(save.glob(".*"))
    elsewhere = options | {"save": tmp_path / "elsewhere", "load": save}
    assert _program(tmp_path, elsewhere)[0] == [0, 0]

    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    before = _contents(save)
    codes, output = _program(tmp_path, options | {"load": save})
    assert codes == [2, 2]
    assert re.match(rf"error: --save {save} cannot be written \(.*Read-only", _error_line(output))
    assert _contents(save) == before
