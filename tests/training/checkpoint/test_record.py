"""checkpoint.json, the files that it describes, and the newest checkpoint that is whole."""

import json
import os
import shutil

import pytest

from moe_parallel.data.sealed import write_sealed
from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint.record import (
    FORMAT,
    check_content,
    checked_file,
    describe_files,
    list_files,
    read_record,
)
from tests.distributed import RankError, run_distributed
from tests.program import SMALL, pretrain_here, same_bytes, small_data, stored_tensors
from tests.tiers import rest_in_full

DATA = {"name": "text", "weight": None, "idx": "1f", "bin": None}
STREAM = {"made_of": {"--seed": 1, "--data-path": [DATA]}, "first": 0, "ends": [160]}
RECORD = {
    "format": FORMAT,
    "training": {"iteration": 4, "consumed_samples": 32, "consumed_tokens": 512},
    "stream": STREAM,
    "adam_step": 4,
    "scheduler": {
        "max_lr": 0.01,
        "lr_warmup_steps": 2,
        "num_steps": 4,
        "lr_decay_style": "cosine",
        "lr_decay_steps": 20,
        "min_lr": 3e-05,
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_style": "constant",
        "wd_incr_steps": 20,
    },
    "layout": {"tp": 1, "world_size": 2},
    "fp8_state": None,
    "fingerprint": {"--hidden-size": 32, "--num-layers": 2},
    "versions": {"torch": "2.13.0"},
}


def _checkpoint(folder, name="iter_0000004"):
    path = folder / name
    path.mkdir()
    (path / "weights").write_text("12345")
    record = RECORD | {"files": describe_files(path, ["weights"])}
    write_sealed(path / "checkpoint.json", record)
    return path


def _error(path):
    """The error of reading a record; None: it was read."""
    try:
        read_record(path)
    except InputError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


def test_a_record_is_read_as_it_was_sealed(tmp_path):
    record = read_record(_checkpoint(tmp_path))
    assert {key: record[key] for key in RECORD} == RECORD


def test_what_is_no_record_is_one_line(tmp_path):
    path = _checkpoint(tmp_path)
    for text in (
        b"",
        b"null",
        b"\xff\xfe",
        b"9" * 5000,
        b"[" * 100_000,
        b'{"format": ' * 100_000,
        b'{"format": 1e400}',
        b'{"format": 2, "checksum": null}',
        json.dumps(RECORD | {"files": {}}).encode(),  # without a checksum
    ):
        (path / "checkpoint.json").write_bytes(text)
        assert "the checkpoint is incomplete or damaged: checkpoint.json is " in _error(path)


@pytest.mark.parametrize("kind", ["a pipe", "/dev/zero"])
def test_a_record_without_end_is_one_line(tmp_path, kind):
    record = _checkpoint(tmp_path) / "checkpoint.json"
    record.unlink()
    os.mkfifo(record) if kind == "a pipe" else record.symlink_to(kind)
    assert "checkpoint.json is missing or unreadable" in _error(record.parent)


def test_a_renamed_checkpoint_is_refused(tmp_path):
    path = _checkpoint(tmp_path)
    renamed = path.rename(tmp_path / "iter_0000006")
    assert _error(renamed) == (
        f"--load {renamed}: it was saved at iteration 4 and has been renamed; rename it to "
        "iter_0000004, or to a name that is not an iteration's"
    )
    assert _error(renamed.rename(tmp_path / "best")) is None


WRONG_KINDS = [
    {"training": {"iteration": 4}},
    {"training": {"iteration": "4", "consumed_samples": 0, "consumed_tokens": 0}},
    {"training": {"iteration": -4, "consumed_samples": 0, "consumed_tokens": 0}},
    {"stream": STREAM | {"ends": []}},
    {"stream": STREAM | {"first": -1}},
    {"stream": STREAM | {"made_of": {"--data-path": [DATA | {"idx": 5}]}}},
    {"adam_step": 1.5},
    {"scheduler": {"num_steps": 4}},
    {"scheduler": RECORD["scheduler"] | {"num_steps": None}},
    {"layout": None},
    {"fingerprint": []},
    {"fp8_state": 3},
    {"files": {"../weights": {"bytes": 5, "crc32": 0}}},
    {"files": {"/dev/zero": {"bytes": 0, "crc32": 0}}},
    {"files": {"weights": {"bytes": 5}}},
    {"files": {"weights": 5}},
    {"files": {"\ud800": {"bytes": 1, "crc32": 1}}},
    {"files": {"a\nb": {"bytes": 1, "crc32": 1}}},
]


def test_a_sealed_record_of_wrong_kinds_is_one_line(tmp_path):
    path = _checkpoint(tmp_path)
    record = RECORD | {"files": describe_files(path, ["weights"])}
    for wrong in WRONG_KINDS:
        write_sealed(path / "checkpoint.json", record | wrong)
        assert "checkpoint.json is not the record of a checkpoint" in _error(path), wrong


def test_files_that_are_missing_cut_or_left_over(tmp_path):
    path = _checkpoint(tmp_path)
    shutil.copy(path / "weights", path / "more")
    assert _error(path) is None
    (path / "weights").write_text("123")
    assert "weights has 3 bytes instead of 5" in _error(path)
    (path / "weights").unlink()
    assert "weights is missing" in _error(path)
    files = {"x" * 5000: {"bytes": 1, "crc32": 1}}
    write_sealed(path / "checkpoint.json", RECORD | {"files": files})
    assert "xxx is missing" in _error(path)


def test_a_file_is_compared_with_the_record_before_it_is_read(tmp_path):
    path = _checkpoint(tmp_path)
    assert checked_file(path, "weights") == path / "weights"
    with pytest.raises(
        InputError, match="the checkpoint is incomplete or damaged: config.yaml is missing"
    ):
        checked_file(path, "config.yaml")
    (path / "weights").write_text("12346")
    with pytest.raises(
        InputError, match="the checkpoint is incomplete or damaged: weights is damaged"
    ):
        checked_file(path, "weights")


def test_a_checksum_is_a_crc_32(tmp_path):
    (tmp_path / "weights").write_text("12345")
    # 0xcbf53a1c is the CRC-32 of "12345" in other programs.
    assert describe_files(tmp_path, list_files(tmp_path)) == {
        "weights": {"bytes": 5, "crc32": 0xCBF53A1C}
    }


def test_ranks_share_the_reading(tmp_path):
    for name in "abcde":
        (tmp_path / name).write_text(name)
    files = describe_files(tmp_path, list_files(tmp_path))
    (tmp_path / "c").write_text("x")
    check_content(tmp_path, files, slice(1, None, 2))
    with pytest.raises(InputError, match="c is damaged"):
        check_content(tmp_path, files, slice(0, None, 2))


def _run_each(commands):
    """(exit code, output) of each command."""
    return [pretrain_here([command])[0] for command in commands]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The flags of a run of 4 iterations that saves each, and its result on two ranks."""
    folder = tmp_path_factory.mktemp("run")
    command = SMALL | small_data(folder) | {"save_interval": 1, "exit_interval": "none"}
    whole = folder / "run"
    run_distributed(2, pretrain_here, [command | {"save": whole, "exit_interval": 3}])
    shutil.copytree(whole, folder / "stopped")
    shutil.rmtree(whole)
    run_distributed(2, pretrain_here, [command | {"save": whole}])
    return command, whole, folder / "stopped"


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _exchange(at):
    other, aside = at.with_name("iter_0000001"), at.with_name("aside")
    for source, target in ((at, aside), (other, at), (aside, other)):
        source.rename(target)


def _cut_log(at):
    log = at.with_name("metrics.jsonl")
    log.write_text(log.read_text().partition('{"iteration": 2')[0])


TRACKER = "latest_checkpointed_iteration.txt"
DAMAGES = {
    "a shard is cut": (lambda at: os.truncate(at / "__1_0.distcp", 100), "__1_0.distcp has 100"),
    "a shard is missing": (lambda at: (at / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "a bit of a shard": (lambda at: _flip(at / "__1_0.distcp"), "__1_0.distcp is damaged"),
    "the record": (lambda at: (at / "checkpoint.json").write_text("{"), "checkpoint.json is"),
    "the configuration": (lambda at: _flip(at / "config.yaml"), "config.yaml is damaged"),
    "the record of another iteration": (
        lambda at: shutil.copy(at.with_name("iter_0000002") / "checkpoint.json", at),
        "it was saved at iteration 2 and has been renamed",
    ),
    "exchanged": (_exchange, "it was saved at iteration 1 and has been renamed"),
    "no log": (lambda at: at.with_name("metrics.jsonl").unlink(), "metrics.jsonl is missing"),
    "a cut log": (_cut_log, "metrics.jsonl ends at iteration 1, and the run goes on after 3"),
    "a tracker of none": (lambda at: at.with_name(TRACKER).write_text("999"), "says 999, but"),
    "an empty tracker": (lambda at: at.with_name(TRACKER).write_text(""), "says '' instead"),
}
QUICK = ("the configuration", "exchanged", "a cut log", "an empty tracker")
REST = tuple(name for name in DAMAGES if name not in QUICK)


@pytest.mark.parametrize("damages", rest_in_full([QUICK, REST], QUICK), ids=len)
def test_a_run_continues_from_the_newest_good_checkpoint(command, tmp_path, damages):
    command, whole, stopped = command
    runs = [tmp_path / str(i) for i in range(len(damages))]
    for run, name in zip(runs, damages, strict=True):
        shutil.copytree(stopped, run)
        DAMAGES[name][0](run / "iter_0000003")
    commands = [command | {"save": run, "load": run} for run in runs]
    commands[-1] = {"load": runs[-1], "exit_interval": "none"}  # the rest is in the checkpoint
    ends, others = run_distributed(2, _run_each, commands, timeout=600)
    assert [code for code, _ in ends + others] == [0] * 2 * len(runs)
    for run, (_, output), name in zip(runs, ends, damages, strict=True):
        (line,) = [line for line in output.splitlines() if line.startswith("warning: ")]
        assert str(run) in line and DAMAGES[name][1] in line
        iteration = 3 if "log" in name or "tracker" in name else 2
        assert "log" in name or line.endswith(f"; the run continues from iter_000000{iteration}")
        assert f"going on after iteration {iteration}" in output
        for iteration in (3, 4):
            name = f"iter_{iteration:07d}"
            assert same_bytes(stored_tensors(run / name), stored_tensors(whole / name))


def test_a_checkpoint_that_is_named_is_not_replaced(command, tmp_path):
    command, _, stopped = command
    run = shutil.copytree(stopped, tmp_path / "run")
    _flip(run / "iter_0000003" / "__0_0.distcp")
    named = command | {"save": run, "load": run / "iter_0000003"}
    with pytest.raises(RankError, match="load another one: .*iter_0000002"):
        run_distributed(2, pretrain_here, [named])
