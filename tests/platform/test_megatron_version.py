"""The accepted versions of Megatron-Core."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from moe_parallel.errors import InputError
from moe_parallel.platform.megatron_version import SUPPORTED, check_megatron_version


@pytest.mark.parametrize("version", ["0.16.1", "0.17.1", "0.18.2", "0.19.2"])
def test_supported(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert check_megatron_version() == version


@pytest.mark.parametrize("version", ["0.15.0", "0.16.0", "0.20.0", "1.0"])
def test_refused(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    message = rf"megatron-core {version} is installed.*pip install 'megatron-core>=0\.16\.1"
    with pytest.raises(InputError, match=message):
        check_megatron_version()


def test_missing(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(InputError, match="not installed: pip install 'megatron-core"):
        check_megatron_version()


def test_the_installed_one_is_supported():
    check_megatron_version()


def test_the_range_is_that_of_pyproject():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"megatron-core{SUPPORTED}" in project["dependencies"]
