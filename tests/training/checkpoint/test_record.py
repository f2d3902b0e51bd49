"""checkpoint.json: damage of any kind gives one line, and no other content is accepted."""

import json
import os
import shutil

import pytest

from moe_parallel.data.sealed import write_sealed
from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint.record import (
    FORMAT,
    checked_file,
    describe_files,
    read_record,
)

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


@pytest.mark.full
def test_every_single_bit_flip_is_one_line_or_changes_nothing(tmp_path):
    path = _checkpoint(tmp_path)
    text = (path / "checkpoint.json").read_bytes()
    whole = read_record(path)
    refused = 0
    for bit in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        (path / "checkpoint.json").write_bytes(flipped)
        if _error(path) is None:
            assert read_record(path) == whole  # 1e-05 as 1E-05
        else:
            refused += 1
    assert refused > 0.8 * 8 * len(text)


def test_every_truncation_is_one_line(tmp_path):
    path = _checkpoint(tmp_path)
    text = (path / "checkpoint.json").read_bytes()
    for size in range(len(text.rstrip())):
        (path / "checkpoint.json").write_bytes(text[:size])
        assert _error(path) is not None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"9" * 5000,
        b"[" * 100_000,
        b'{"format": ' * 100_000,
        b'{"format": 2, "layout": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"format": 1e400}',
        b'{"format": true}',
        b'{"format": 1}',
        b'{"format": 1.0}',
        b'{"format": 2, "checksum": null}',
    ],
    ids=range(13),
)
def test_what_is_no_record_is_one_line(tmp_path, text):
    path = _checkpoint(tmp_path)
    (path / "checkpoint.json").write_bytes(text)
    assert "the checkpoint is incomplete or damaged: checkpoint.json is " in _error(path)


@pytest.mark.parametrize("name", ["\ud800", "a\nb", "x" * 5000], ids=["half", "line", "long"])
def test_a_name_that_no_file_can_have_is_one_line(tmp_path, name):
    path = _checkpoint(tmp_path)
    files = {name: {"bytes": 1, "crc32": 1}}
    write_sealed(path / "checkpoint.json", RECORD | {"files": files, "format": FORMAT})
    assert "\n" not in _error(path)


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


def test_a_record_of_another_program(tmp_path):
    path = _checkpoint(tmp_path)
    files = describe_files(path, ["weights"])
    write_sealed(path / "checkpoint.json", RECORD | {"files": files, "format": 7})
    assert "its format is 7, and this program reads 2; load it with" in _error(path)


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
]


@pytest.mark.parametrize("wrong", WRONG_KINDS, ids=range(len(WRONG_KINDS)))
def test_a_sealed_record_of_wrong_kinds_is_one_line(tmp_path, wrong):
    path = _checkpoint(tmp_path)
    record = RECORD | {"files": describe_files(path, ["weights"])}
    write_sealed(path / "checkpoint.json", record | wrong)
    assert "checkpoint.json is not the record of a checkpoint" in _error(path)


def test_a_record_without_its_checksum_is_damaged(tmp_path):
    path = _checkpoint(tmp_path)
    record = RECORD | {"files": describe_files(path, ["weights"])}
    (path / "checkpoint.json").write_text(json.dumps(record))
    assert "checkpoint.json is damaged (without a checksum)" in _error(path)


def test_files_that_are_missing_cut_or_left_over(tmp_path):
    path = _checkpoint(tmp_path)
    shutil.copy(path / "weights", path / "more")
    assert _error(path) is None
    (path / "weights").write_text("123")
    assert "weights has 3 bytes instead of 5" in _error(path)
    (path / "weights").unlink()
    assert "weights is missing" in _error(path)


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
