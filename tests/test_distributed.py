"""The helper that runs a function on several ranks."""

import os
import time

import pytest
import torch
from torch import distributed as dist

from tests.distributed import RankError, run_distributed


def _sum_of_ranks(offset):
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return value.item(), torch.get_num_threads(), os.environ["RANK"]


def _fail_on_rank_one():
    if dist.get_rank() == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()


def _exit():
    raise SystemExit(2)


def _hang_on_rank_zero(path):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    if dist.get_rank() == 0:
        (path / "child").write_text(str(child))
        time.sleep(60)


def test_results_come_by_rank():
    assert run_distributed(3, _sum_of_ranks, 10) == [(33.0, 1, "0"), (33.0, 1, "1"), (33.0, 1, "2")]


def test_the_rank_that_failed_is_named_with_its_traceback():
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*_fail_on_rank_one.*had enough"):
        run_distributed(2, _fail_on_rank_one)


@pytest.mark.full
def test_a_hang_ends_in_time_with_nothing_left_running(tmp_path):
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 2"):
        run_distributed(2, _hang_on_rank_zero, tmp_path, timeout=3)
    child = int((tmp_path / "child").read_text())
    for _ in range(50):  # the kernel needs a moment
        if not _is_running(child):
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} outlived its rank")


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False
