"""The record of how a run was started."""

import json

import pytest

from moe_parallel.platform.machine import PACKAGES
from moe_parallel.training import starts


def lines(folder):
    return [json.loads(line) for line in (folder / starts.STARTS_FILE).read_text().splitlines()]


def test_the_launcher_keeps_its_command_for_the_ranks(tmp_path, monkeypatch):
    monkeypatch.delenv(starts.COMMAND, raising=False)
    starts.record_start(tmp_path, 1, None)
    monkeypatch.setenv(starts.COMMAND, "")  # so that it is restored after the test
    monkeypatch.delenv(starts.COMMAND)
    starts.keep_command("pretrain_gpt_moe.py", ["--nproc-per-node", "2", "--save", "my run"])
    starts.keep_command("pretrain_gpt_moe.py", ["--save", "my run"])  # a rank of that launcher
    starts.record_start(tmp_path, 2, "my run")
    library, launched = lines(tmp_path)
    assert library["command"] is None
    assert launched["command"] == ("python pretrain_gpt_moe.py --nproc-per-node 2 --save 'my run'")
    assert (launched["ranks"], launched["load"]) == (2, "my run")
    assert set(launched["versions"]) == {"python", "moe-parallel", *PACKAGES}


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(OSError):
        starts.record_start(tmp_path / "gone", 1, None)
