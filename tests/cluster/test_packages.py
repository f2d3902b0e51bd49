"""A machine that cannot have a cluster names what it lacks."""

import shutil

import pytest

from tests.cluster import nodes
from tests.cluster.slurm import PACKAGES, why_not


@pytest.mark.parametrize(
    ("absent", "installed"),
    [({"nft"}, "nftables"), ({"tc"}, "iproute2"), ({"squeue", "munged"}, "munge slurm-client")],
)
def test_missing_programs_and_their_packages_are_named(monkeypatch, absent, installed):
    monkeypatch.setattr(shutil, "which", lambda name: None if name in absent else f"/bin/{name}")
    reason = why_not()
    assert reason.startswith(f"not installed: {', '.join(n for n in PACKAGES if n in absent)}; ")
    assert reason.endswith(f"--no-install-recommends {installed}")


def test_a_user_other_than_root_is_told(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(nodes.os, "geteuid", lambda: 1000)
    assert why_not() == "network namespaces need root"
