"""Two nodes with a slow or lossy network, a full disk, and data that disappears."""

import shutil
import subprocess

import pytest

from tests.cluster.disturbances import disturbed
from tests.cluster.job import SlurmJob
from tests.program import EVERY_2, LAST, SMALL

pytestmark = [pytest.mark.cluster, pytest.mark.full]


@pytest.fixture
def options(undisturbed):
    return SMALL | undisturbed.data | EVERY_2


@pytest.fixture
def lossy(cluster):
    cluster.nodes.lose_packets("node2", 5)
    yield
    cluster.nodes.lose_packets("node2", 0)


def test_lost_packets_change_no_result(cluster, tmp_path, options, undisturbed, lossy):
    job = SlurmJob(cluster, tmp_path, options)
    job.complete()
    assert job.restarts == 0
    job.check_whole(undisturbed)


@pytest.fixture
def slow(cluster):
    cluster.nodes.limit_rate("node2", "20mbit")
    yield
    cluster.nodes.limit_rate("node2", "10gbit")


def test_a_slow_link_changes_no_result(cluster, tmp_path, options, undisturbed, slow):
    job = SlurmJob(cluster, tmp_path, options)
    job.complete()
    job.check_whole(undisturbed)


def test_a_full_disk_ends_the_job_with_code_2(cluster, tmp_path, options, undisturbed):
    if not cluster.small_disk.is_mount():
        pytest.skip("this machine does not permit to mount a small disk")
    job = SlurmJob(cluster, tmp_path, options, run=cluster.small_disk / "run")
    cluster.wait_for(job.id, "FAILED")
    assert job.exit_code == 2
    assert "training continues without it" in job.output  # the periodic saves that did not fit
    (last,) = [line for line in job.output.splitlines() if line.startswith("error: ")]
    assert f"cannot write the checkpoint of iteration {LAST}" in last
    assert "requeued" not in job.output
    job.check_published()
    enlarge = ["mount", "-o", "remount,size=64m", str(cluster.small_disk)]
    subprocess.run(enlarge, check=True)
    job.submit()
    job.complete()
    job.check_whole(undisturbed)


def _copied(data, folder):
    """The prefixes of a copy of the data in a folder."""
    folder.mkdir()
    for prefix in data:
        for path in prefix.parent.glob(prefix.name + ".*"):
            shutil.copy(path, folder)
    return [folder / prefix.name for prefix in data]


def test_data_that_disappears_during_a_run_stays_mapped(cluster, tmp_path, options, undisturbed):
    """On a local disk. A network disk may take the pages away: the rank ends by SIGBUS."""
    paths = _copied(options["data_path"], tmp_path / "data")
    job = SlurmJob(
        cluster, tmp_path, options | {"data_path": paths},
        variables=disturbed(tmp_path, "pause_in_a_step 1"),
    )  # fmt: skip
    cluster.wait_until((tmp_path / "started").exists, 120, "a rank pauses in a step")
    shutil.rmtree(tmp_path / "data")
    assert job.left_its_pause == ""
    job.go_on()
    job.complete()
    assert job.restarts == 0
    job.check_whole(undisturbed)


def test_data_that_disappears_between_two_starts(cluster, tmp_path, options, undisturbed):
    paths = _copied(options["data_path"], tmp_path / "data")
    job = SlurmJob(cluster, tmp_path, options | {"data_path": paths})
    job.wait_for_output("iteration  3/12")
    cluster.run("scancel", str(job.id))
    cluster.wait_for_nodes()
    gone = paths[1].with_name(paths[1].name + ".bin")
    gone.rename(tmp_path / "kept")
    job.submit()
    cluster.wait_for(job.id, "FAILED")
    assert job.exit_code == 2
    assert str(gone) in job.output
    (tmp_path / "kept").rename(gone)
    job.submit()
    job.complete()
    job.check_whole(undisturbed)
