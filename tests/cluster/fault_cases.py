"""The cases of tests/cluster/test_faults.py, and why other combinations are not among them.

Every fault meets every moment, as a case or with a reason. The page docs/reliability.md has a time
or a dash for each of them; tests/cluster/test_fault_table.py compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.cluster import disturbances as do
from tests.cluster.disturbances import FIRST, SECOND
from tests.cluster.job import SlurmJob
from tests.program import Options

START, STEP, SAVE, EVALUATION = MOMENTS = (
    "at start", "in a step", "in a save", "in an evaluation",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    do: Callable[[SlurmJob, str], None]
    repair: Callable[[SlurmJob, str], None]
    restarts: int | None  # of the job by Slurm; None: depends on who is faster
    seen: str  # a pattern in a line that the user sees
    within: int  # seconds from the fault to the complete run; more fails the test
    moments: tuple[str, ...] = MOMENTS
    untested: str = ""  # why it does not meet the other moments
    node: str = SECOND
    options: Options = field(default_factory=dict)
    disturb: str | None = None  # the function of tests/launch/disturbed.py that is the fault
    damages: bool = False  # whether it damages a checkpoint on purpose
    label: str = ""  # replaces the name of `do`
    variables: Mapping[str, str] = field(default_factory=dict)  # that the user has exported

    @property
    def name(self) -> str:
        name = self.label or self.do.__name__.replace("_", " ")
        place = ", node 1" if self.node == FIRST else ""
        return f"{name}{place}"

    def disturbance(self, moment: str) -> str:
        """DISTURB of tests/launch/disturbed.py. Where the fault is not the program's own, a rank of
        the node that it hits pauses at the moment."""
        rank = 0 if self.node == FIRST else 1
        return self.disturb or f"pause_{moment.replace(' ', '_')} {rank}"


REQUEUED = "is requeued"
NODE_LOST = r"DUE TO NODE FAILURE|NODE_FAIL|nodes? .*(failed|not responding)|Node failure"
GOES_ON = r"going on after iteration"  # of the next start: srun and the script were on the node
COMPLETE = r"^iteration 12/12"
AGAIN = r"starting again: restart 1 of 3"
SILENT = r"^error: rank 1 on node2 .* (hangs in|is silent for \d+ s, last in) "
HANGS = r"^error: rank 1 on node2 .* hangs in "
DAMAGED = r"^warning: .*; the run continues from iter_"
HANG = {"hang_timeout": 6}
SHORT_WAIT = {"SRUN_FLAGS": "--wait=10"}  # the scripts have 120 seconds
LATE = {"hang_timeout": 15}  # after a signal that the test sends while the rank pauses

#: Where a rank that pauses is, in the words of a heartbeat.
WHERE = {
    STEP: "forward of iteration 5", SAVE: "save after iteration 4",
    EVALUATION: r"evaluate \(forward\) after iteration 3",
}  # fmt: skip

ONE_MOMENT = "one moment is tested on node 1, all on node 2"
NO_HEARTBEAT = (
    "no heartbeat yet: `--distributed-timeout-minutes` (10) ends the start with code 76; without "
    "Slurm: tests/training/test_failure.py"
)
LONG = "one moment is tested: Slurm ends the job, whatever it does"
NEEDS_CHECKPOINT = "read only at a start, whatever the moment of the damage"

FAULTS = [
    Fault(do.kill_the_node, do.start_slurmd, 1, NODE_LOST, 180),
    Fault(
        do.kill_the_node, do.start_slurmd, 1, GOES_ON, 180, (STEP,), ONE_MOMENT, FIRST
    ),
    # Before the ranks have met, only Slurm ends those that wait for a lost one.
    Fault(do.kill_a_rank, do.nothing, 0, AGAIN, 120, (START,), variables=SHORT_WAIT),
    Fault(do.kill_a_rank, do.nothing, 0, AGAIN, 120, MOMENTS[1:]),
    Fault(do.kill_a_rank, do.nothing, 0, AGAIN, 120, (STEP,), ONE_MOMENT, FIRST),
    # The run is complete before SlurmdTimeout. If it still runs then, Slurm ends the job.
    Fault(do.kill_slurmd, do.start_slurmd, None, COMPLETE, 180),
    Fault(do.lose_slurmd, do.start_slurmd, 1, NODE_LOST, 180, (STEP,), LONG),
    Fault(do.cut_the_link, do.mend_the_link, 1, NODE_LOST, 180),
    Fault(do.cut_the_link, do.mend_the_link, 1, GOES_ON, 180, (STEP,), ONE_MOMENT, FIRST),
    Fault(do.interrupt_the_link, do.nothing, 0, COMPLETE, 120),
    Fault(do.reach_the_time_limit, do.nothing, 1, REQUEUED, 120),
    Fault(do.preempt, do.nothing, 1, REQUEUED, 120),
    *(
        Fault(
            do.stop_a_rank, do.nothing, 0, SILENT + where, 120, (moment,), NO_HEARTBEAT,
            options=LATE, variables=SHORT_WAIT,
        )
        for moment, where in WHERE.items()
    ),
    *(
        Fault(
            do.sleep, do.nothing, 0, HANGS, 120, (moment,), options=HANG, disturb=f"{what} 1",
            label="a rank sleeps",
        )
        for moment, what in zip(MOMENTS, ("set_up", "forward", "save", "evaluation"), strict=True)
    ),
    Fault(
        do.be_slow, do.nothing, 0, COMPLETE, 120, (STEP,),
        "a slow rank is slow at all moments: one case", disturb="slow_steps 1",
        label="a slow rank",
    ),
    Fault(do.cut_a_shard, do.nothing, 0, DAMAGED, 120, (STEP,), NEEDS_CHECKPOINT, damages=True),
    Fault(do.remove_a_shard, do.nothing, 0, DAMAGED, 120, (STEP,), NEEDS_CHECKPOINT, damages=True),
]  # fmt: skip

#: What a message names when a weight becomes NaN at this moment.
POISONED = {STEP: r"rank.* 1\b", SAVE: "iteration 4", EVALUATION: "validation text"}
NAN, NAN_WITHIN = "NaN on a rank", 120

LOST_NODE = ("the node is lost before the start", START)
REAL_LIMIT = ("Slurm's own signal before the limit", STEP)


def cases() -> list[tuple[Fault, str]]:
    return [(fault, moment) for fault in FAULTS for moment in fault.moments]


def proven() -> set[tuple[str, str]]:
    """(fault, moment) of each cell that a test writes."""
    cells = {(fault.name, moment) for fault, moment in cases()}
    return cells | {(NAN, moment) for moment in POISONED} | {LOST_NODE, REAL_LIMIT}


def not_tested() -> dict[tuple[str, str], str]:
    """(fault, moment) of each other combination, and the reason."""
    reasons = {(fault.name, moment): fault.untested for fault in FAULTS for moment in MOMENTS}
    reasons[NAN, START] = "there are no weights yet"
    for moment in MOMENTS:
        reasons[LOST_NODE[0], moment] = "kill_the_node has these moments"
        reasons[REAL_LIMIT[0], moment] = "reach_the_time_limit has these moments"
    return {cell: reason for cell, reason in reasons.items() if cell not in proven()}
