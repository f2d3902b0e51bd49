"""One rank's failure is every rank's failure."""

import errno

import pytest
from torch import distributed as dist

from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint_agreement import StorageError, agree, exchange, on_rank_0
from tests.distributed import run_distributed


def _outcome(error, failing_rank):
    def action():
        if dist.get_rank() == failing_rank:
            raise error
        return f"done on {dist.get_rank()}"

    try:
        return agree(action)
    except Exception as raised:
        return type(raised).__name__, str(raised)
    finally:
        assert exchange(dist.get_rank()) == [0, 1]  # the ranks are still in step


@pytest.mark.parametrize(
    ("error", "everywhere"),
    [
        (InputError("--lr -1"), ("InputError", "--lr -1")),
        (OSError(errno.ENOSPC, "No space", "/a"), ("StorageError", "/a: No space")),
        (StorageError("/b: gone"), ("StorageError", "/b: gone")),
    ],
)
def test_users_errors_are_the_same_everywhere(error, everywhere):
    assert run_distributed(2, _outcome, error, 1) == [everywhere] * 2


def test_other_errors_name_the_rank():
    assert run_distributed(2, _outcome, KeyError("x"), 1) == [
        ("RuntimeError", "rank 1 failed: 'x'"),
        ("KeyError", "'x'"),
    ]


def test_without_failure_every_rank_has_its_own_result():
    assert run_distributed(2, _outcome, ValueError(), None) == ["done on 0", "done on 1"]


def _ranks_that_act():
    acted = []
    on_rank_0(lambda: acted.append(dist.get_rank()))
    return acted


def test_on_rank_0():
    assert run_distributed(2, _ranks_that_act) == [[0], []]
