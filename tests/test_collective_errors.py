"""If one rank fails, every rank fails."""

import errno
from functools import partial

from torch import distributed as dist

from moe_parallel.collective_errors import StorageError, agree, exchange, on_rank_0, rank_0_first
from moe_parallel.errors import InputError
from tests.distributed import run_distributed

FAILURES = {
    InputError("--lr -1"): [("InputError", "--lr -1")] * 2,
    OSError(errno.ENOSPC, "No space", "/a"): [("StorageError", "/a: No space")] * 2,
    OSError(errno.EPERM, "No", "/ä\n\x1b\udcff"): [("StorageError", r"/ä\n\x1b\udcff: No")] * 2,
    StorageError("/b: gone"): [("StorageError", "/b: gone")] * 2,
    KeyError("x"): [("RuntimeError", "rank 1 failed: 'x'"), ("KeyError", "'x'")],
}


def _outcomes():
    """The error of `agree` on this rank if rank 1 fails, and its result if no rank fails."""
    rank = dist.get_rank()

    def fail(error):
        if rank == 1:
            raise error

    outcomes = []
    for error in FAILURES:
        try:
            agree(partial(fail, error))
        except Exception as raised:
            outcomes.append((type(raised).__name__, str(raised)))
        assert exchange(rank) == [0, 1]  # the ranks are still synchronized
    acted = []
    on_rank_0(lambda: acted.append(rank))
    return outcomes, agree(lambda: f"done on {rank}"), acted


def test_a_failure_reaches_every_rank():
    (first, done_0, acted_0), (second, done_1, acted_1) = run_distributed(2, _outcomes)
    assert list(zip(first, second, strict=True)) == [tuple(pair) for pair in FAILURES.values()]
    assert (done_0, done_1) == ("done on 0", "done on 1")
    assert (acted_0, acted_1) == ([0], [])


def _first_writes(place):
    """Rank 0 finds no file and creates it; each later rank finds it."""

    def look():
        found = place.exists()
        place.touch()
        return found

    return rank_0_first(look)


def test_rank_0_goes_first(tmp_path):
    assert run_distributed(2, _first_writes, tmp_path / "note") == [True, True]
    assert rank_0_first(lambda: 3) == 3  # without a process group


def _first_fails():
    def action():
        raise InputError(f"rank {dist.get_rank()}")

    try:
        rank_0_first(action)
    except InputError as error:
        return str(error)


def test_rank_0_failing_first_fails_all():
    assert run_distributed(2, _first_fails) == ["rank 0", "rank 0"]
