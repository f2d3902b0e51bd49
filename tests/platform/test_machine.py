"""The description of a machine and its software."""

import platform
from importlib import metadata
from pathlib import Path

from moe_parallel.platform import machine


def test_processor_cores_memory_and_gpus_are_a_line(monkeypatch):
    monkeypatch.setattr(machine, "_output", lambda *command: "A100, 550.1\nA100, 550.1\nH200, 1")
    parts = machine.machine().split(", ")
    assert any(part.endswith(" cores") for part in parts)
    assert any(part.endswith(" GiB") for part in parts)
    assert parts[-4:] == ["2 x A100", "550.1", "1 x H200", "1"]


def test_versions_and_the_commit_where_there_is_one(tmp_path: Path, monkeypatch):
    told = machine.software(tmp_path)
    assert told["Python"] == platform.python_version()
    assert told["torch"] == metadata.version("torch")
    assert "commit" not in told
    monkeypatch.setattr(machine, "_output", lambda *command: "abc123-dirty")
    assert machine.software(tmp_path)["commit"] == "abc123-dirty"
