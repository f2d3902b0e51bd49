"""The cases of tests/cluster/test_faults.py, and why other combinations are not among them.

Every fault meets every moment, as a case or with a reason. The page docs/reliability.md has a row
for each of them; tests/cluster/test_fault_table.py compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.cluster import disturbances as do
from tests.cluster.disturbances import FIRST, SECOND
from tests.cluster.job import SlurmJob
from tests.program import Options

Moment = Callable[[SlurmJob], bool]
START, STEP, SAVE, EVALUATION = MOMENTS = (
    do.at_start, do.in_a_step, do.in_a_save, do.in_an_evaluation,
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    do: Callable[[SlurmJob, str], None]
    repair: Callable[[SlurmJob, str], None]
    restarts: int | None  # of the job by Slurm; None: depends on who is faster
    seen: str  # a pattern in a line that the user sees
    within: int  # seconds from the fault to the complete run; more fails the test
    moments: tuple[Moment, ...] = MOMENTS
    untested: str = ""  # why it does not meet the other moments
    node: str = SECOND
    options: Options = field(default_factory=dict)
    disturb: str | None = None  # the function of tests/launch/disturbed.py that does it
    damages: bool = False  # whether it damages a checkpoint on purpose
    label: str = ""  # replaces the name of `do`

    @property
    def name(self) -> str:
        name = self.label or self.do.__name__.replace("_", " ")
        return f"{name}, node 1" if self.node == FIRST else name


def name_of(moment: Moment | str) -> str:
    return (moment if isinstance(moment, str) else moment.__name__).replace("_", " ")


REQUEUED = "is requeued"
NODE_LOST = r"DUE TO NODE FAILURE|NODE_FAIL|nodes? .*(failed|not responding)|Node failure"
GOES_ON = r"going on after iteration"  # of the next start: srun and the script were on the node
COMPLETE = r"^iteration 12/12"
AGAIN = r"starting again: restart 1 of 3"
SILENT = r"^error: rank 1 on node2 .* (hangs|is silent)"
HANGS = r"^error: rank 1 on node2 .* hangs in "
DAMAGED = r"^warning: .*; the run continues from iter_"
HANG = {"hang_timeout": 6}

ONE_MOMENT = "one moment is tested on node 1, all on node 2"
NO_HEARTBEAT = "no heartbeat yet: torch's limit of 10 minutes ends the start"
NEEDS_CHECKPOINT = "read only at a start, whatever the moment of the damage"

FAULTS = [
    Fault(do.kill_the_node, do.start_slurmd, 1, NODE_LOST, 180),
    Fault(
        do.kill_the_node, do.start_slurmd, 1, GOES_ON, 180, (STEP,), ONE_MOMENT, FIRST
    ),
    Fault(do.kill_a_rank, do.nothing, 0, AGAIN, 120),
    Fault(do.kill_a_rank, do.nothing, 0, AGAIN, 120, (STEP,), ONE_MOMENT, FIRST),
    Fault(do.kill_a_launcher, do.nothing, 1, REQUEUED, 120),
    Fault(do.kill_a_launcher, do.nothing, 1, REQUEUED, 120, (STEP,), ONE_MOMENT, FIRST),
    # The run goes on; Slurm ends it if it still runs after SlurmdTimeout.
    Fault(do.kill_slurmd, do.start_slurmd, None, COMPLETE, 180),
    Fault(do.cut_the_link, do.mend_the_link, 1, NODE_LOST, 180),
    Fault(do.cut_the_link, do.mend_the_link, 1, GOES_ON, 180, (STEP,), ONE_MOMENT, FIRST),
    Fault(do.interrupt_the_link, do.nothing, 0, COMPLETE, 120),
    Fault(do.reach_the_time_limit, do.nothing, 1, REQUEUED, 120),
    Fault(do.preempt, do.nothing, 1, REQUEUED, 120),
    Fault(
        do.stop_a_rank, do.nothing, 0, SILENT, 120, (STEP, SAVE, EVALUATION), NO_HEARTBEAT,
        options=HANG,
    ),
    *(
        Fault(
            do.hang, do.nothing, 0, HANGS, 120, (moment,), options=HANG, disturb=f"{what} 1",
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
POISONED = {
    "in_a_step": r"rank.* 1\b",
    "in_a_save": "iteration 4",
    "in_an_evaluation": "validation text",
}
NAN, NAN_WITHIN = "NaN on a rank", 120

#: Combinations that other tests prove, and these tests.
ELSEWHERE = {
    ("5% of all packets lost; a slow link", "all"): "tests/cluster/test_disk_and_network.py",
    ("a full disk", "every save"): "tests/cluster/test_disk_and_network.py; each step of a save: "
    "tests/training/checkpoint/test_failures.py",
    ("a save torn at any byte", "in a save"): "without Slurm: tests/training/test_stopped_runs.py, "
    "tests/training/checkpoint/test_record.py, tests/slow/test_checkpoint_corruption.py",
    ("a data file disappears", "at start"): "tests/cluster/test_disk_and_network.py",
    ("a data file is cut", "in a step"): "without Slurm: tests/platform/test_bus_error.py",
}


def cases() -> list[tuple[Fault, Moment]]:
    return [(fault, moment) for fault in FAULTS for moment in fault.moments]


def bounds() -> dict[tuple[str, str], int]:
    """(fault, moment) and the seconds within which its run must be complete."""
    return {(fault.name, name_of(moment)): fault.within for fault, moment in cases()}


def proven() -> set[tuple[str, str]]:
    """(fault, moment) of each row that a test writes."""
    rows = {(fault.name, name_of(moment)) for fault, moment in cases()}
    return rows | {(NAN, name_of(moment)) for moment in POISONED} | {LOST_NODE, REAL_LIMIT}


def not_tested() -> dict[tuple[str, str], str]:
    """(fault, moment) of each other combination, and the reason."""
    reasons = {
        (fault.name, name_of(moment)): fault.untested for fault in FAULTS for moment in MOMENTS
    }
    reasons[NAN, name_of(START)] = "there are no weights yet"
    return {row: reason for row, reason in reasons.items() if row not in proven()}


LOST_NODE = ("the node is lost", "before the start")
REAL_LIMIT = ("Slurm's own signal before the limit", "in a step")
