"""Tests on a Slurm cluster of namespaces: `make test-cluster`, pytest's `--cluster`."""

from pathlib import Path

import pytest

from tests.cluster.fault_table import FaultTable
from tests.cluster.job import Undisturbed
from tests.cluster.slurm import Cluster, why_not


@pytest.fixture(scope="session")
def possible():
    """Skips where the machine cannot have a cluster."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(possible, tmp_path_factory):
    """Two nodes. A test that ends leaves them idle, or the next one waits until they are."""
    with Cluster(2, tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """A run of two ranks on this machine, without Slurm, that nothing disturbed."""
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def table(pytestconfig):
    """What a test of a fault has seen; --write-table puts it into a page."""
    table = FaultTable()
    yield table
    if page := pytestconfig.getoption("--write-table"):
        table.write(Path(page))
