"""Which of the ranks is to blame, from tables of what was heard of them."""

import pytest

from moe_parallel.training.heartbeat import Beat, Sighting, blame, is_hung, message

TIMEOUT = 100.0
NOW = "reduce of iteration 5"


def _seen(iteration=5, changes=20, waits=True, silent=1.0, idle=120.0, place=NOW, stack=None):
    beat = Beat(
        number=7,
        host="node3",
        process=4711,
        iteration=iteration,
        changes=changes,
        place=place,
        work=0,
        waits=waits,
        stack=stack,
    )
    return Sighting(beat, silent, idle)


WAITS = _seen()
SLEEPS = _seen(changes=3, waits=False, place="data of iteration 5")
STOPPED = _seen(changes=9, waits=False, silent=121.0)
UNHEARD = Sighting(None, 130.0, 130.0)

TABLES = {
    "one sleeps in data": ([WAITS, WAITS, SLEEPS, WAITS], 2),
    "one sleeps where the others are": ([WAITS, _seen(waits=False), WAITS], 1),
    "one sleeps in the iteration before": ([WAITS, _seen(4, 90, waits=False)], 1),
    # A later pipeline stage has changed its phase less often, and is not to blame for it.
    "the first stage sleeps, the second waits for it": ([SLEEPS, _seen(changes=1)], 0),
    "two sleep, one is behind": ([_seen(changes=9, waits=False), SLEEPS, WAITS], 1),
    "one is stopped, others wait": ([WAITS, STOPPED, WAITS], 1),
    "one is stopped, another computes": ([SLEEPS, STOPPED, WAITS], 1),
    "a host is lost: the first rank of those that are behind": (
        [WAITS, WAITS, STOPPED, _seen(changes=8, waits=False, silent=121.0), STOPPED],
        3,
    ),
    "one was never heard": ([WAITS, STOPPED, UNHEARD], 2),
    "all wait, in different collectives": ([WAITS, _seen(changes=19), WAITS], 1),
    "all wait in the same one": ([WAITS, WAITS], 0),
}


@pytest.mark.parametrize("name", TABLES)
def test_who_is_to_blame(name):
    table, rank = TABLES[name]
    assert is_hung(table, TIMEOUT)
    assert blame(table, TIMEOUT) == rank
    assert message(table, TIMEOUT).startswith(f"error: rank {rank} ")


@pytest.mark.parametrize(
    "table",
    [
        [WAITS, _seen(idle=99.0)],
        # A rank whose heartbeat does not arrive, while training goes on, has a problem of its own.
        [_seen(idle=2.0), STOPPED],
    ],
)
def test_while_one_rank_makes_progress_there_is_no_hang(table):
    assert not is_hung(table, TIMEOUT)


def test_the_message_about_a_rank_that_sleeps():
    stack = '  File "a.py", line 3, in read\n'
    sleeps = _seen(changes=3, waits=False, place="data of iteration 5", stack=stack)
    assert message([WAITS, sleeps, WAITS], TIMEOUT) == (
        "error: rank 1 on node3 (process 4711) hangs in data of iteration 5: no rank made progress "
        "for 100 s (--hang-timeout 100); all others are in reduce of iteration 5. Its Python "
        'stack, the innermost call last:\n  File "a.py", line 3, in read'
    )


def test_the_message_about_silent_ranks_says_what_is_not_known():
    text = message([STOPPED, WAITS, STOPPED, WAITS, SLEEPS], TIMEOUT)
    assert text == (
        "error: rank 0 on node3 (process 4711) is silent for 121 s, last in reduce of iteration 5 "
        "(--hang-timeout 100); also silent: 2: its process is stopped, its host or network is "
        "gone, or native code blocks its interpreter; there is no stack of a silent rank; 3 of 4 "
        "others are in reduce of iteration 5"
    )
    assert "has not been heard since the job began" in message([WAITS, UNHEARD], TIMEOUT)


def test_the_message_if_every_rank_waits():
    text = message([WAITS, _seen(changes=19)], TIMEOUT)
    assert "; every rank waits in a collective, and this one is furthest behind" in text


def test_a_beat_is_read_as_it_was_sent():
    beat = _seen(stack='File "ä"\n').beat
    assert Beat.decode(beat.encode().encode()) == beat
