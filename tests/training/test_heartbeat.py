"""Which rank is to blame for a job that hangs, and how it is told; tests/launch/test_hangs.py has
jobs."""

import pytest

from moe_parallel.training.heartbeat import Beat, Sighting, blame

LIMIT = 100.0
NOW = "reduce of iteration 5"


def _seen(rank, iteration=5, changes=20, waits=True, silent=1.0, idle=120.0, place=NOW):
    who, reached = f"rank {rank} on node3 (process 4711)", (iteration, changes, 0)
    return Sighting(Beat(7, who, place, reached, waits, '  File "a.py"\n'), silent, idle)


BUSY = {"changes": 3, "waits": False, "place": "data of iteration 5"}
STOPPED = {"changes": 9, "waits": False, "silent": 121.0}
#: By rank, how it differs from one that waits with the others; and the rank to blame.
TABLES = {
    "one sleeps in data": ([{}, {}, BUSY, {}], 2),
    "one sleeps where the others are": ([{}, {"waits": False}, {}], 1),
    "one sleeps in the iteration before": (
        [{}, {"waits": False}, {"iteration": 4, "changes": 90, "waits": False}], 2,
    ),
    # A later pipeline stage has changed its phase less often, and is not to blame for it.
    "the first stage sleeps, the second waits for it": ([BUSY, {"changes": 1}], 0),
    "two sleep, one is behind": ([{"changes": 9, "waits": False}, BUSY, {}], 1),
    "one is stopped, another computes": ([BUSY, STOPPED, {}], 1),
    "a host is lost: the first rank of those that are behind": (
        [{}, {}, STOPPED, STOPPED | {"changes": 8}, STOPPED], 3,
    ),
    "all wait, in different collectives": ([{}, {"changes": 19}, {}], 1),
    "all wait in the same one": ([{}, {}], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_who_is_to_blame(name):
    table, rank = TABLES[name]
    message = blame([_seen(n, **each) for n, each in enumerate(table)], LIMIT)
    assert message is not None and message.startswith(f"error: rank {rank} ")


@pytest.mark.parametrize(
    "table",
    # A rank whose heartbeat does not arrive, while training goes on, has a problem of its own.
    [[{}, {"idle": 99.0}], [{"idle": 2.0}, STOPPED]],
)
def test_while_one_rank_makes_progress_there_is_no_hang(table):
    assert blame([_seen(n, **each) for n, each in enumerate(table)], LIMIT) is None


def test_the_messages():
    assert blame([_seen(0), _seen(1, **BUSY)], LIMIT) == (
        "error: rank 1 on node3 (process 4711) hangs in data of iteration 5: no rank made progress "
        "for 100 s (--hang-timeout 100). Its Python stack, the innermost call last:\n"
        '  File "a.py"'
    )
    assert blame([_seen(0), _seen(1, **STOPPED)], LIMIT) == (
        "error: rank 1 on node3 (process 4711) is silent for 121 s, last in reduce of iteration 5 "
        "(--hang-timeout 100): its process is stopped, its host or network is gone, or native code "
        "blocks its interpreter"
    )
