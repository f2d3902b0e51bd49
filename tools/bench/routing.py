"""Time a model under imbalance: the same model, with the load of its experts forced.

    make bench ARGS="--routing hot:1,zipf"             # and balanced, in about a minute
    make bench ARGS="--routing hot:1 --budget 8"       # also with --moe-activation-budget 8
    python tools/bench/routing.py --routing hot:0.5 --expert-selection aoe

The experts are divided over --ranks processes of this machine, so a busy expert makes a busy rank.
Each line is a workload of --moe-router-force-routing. The columns are: the rows of the busiest rank
over the mean; the CPU time of a forward and backward pass on the slowest rank; the most memory that
one rank allocates in it; and the activations that one rank keeps. Ratios compare with balanced. The
passes of the workloads take turns. The tool uses the CPU, with one thread for each rank. Exit
codes: 0 done, 2 a wrong flag, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Megatron-Core would use a GPU

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_parallel.platform.megatron import suppress_warnings

suppress_warnings()  # before Megatron-Core is imported

from moe_parallel.config.forced_routing import parse_forced_routing  # noqa: E402
from moe_parallel.errors import InputError  # noqa: E402
from moe_parallel.tool import Tool, check_positive  # noqa: E402
from tools.bench.benchmark import about, words  # noqa: E402
from tools.bench.forced import (  # noqa: E402
    SYSTEMS,
    ForcedWorkload,
    Task,
    format_workloads,
    measure_on_ranks,
)

BALANCED = "balanced"


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    add = tool.add_argument
    add("--routing", type=words, metavar="A,B,...", default=["hot:1", "zipf"],
        help="workloads, as in --moe-router-force-routing (default: hot:1,zipf)")  # fmt: skip
    add("--expert-selection", choices=SYSTEMS, default=SYSTEMS[0],
        help="the system (default: %(default)s)")  # fmt: skip
    add("--budget", type=float, metavar="MIB",
        help="measure each workload with this --moe-activation-budget too")  # fmt: skip
    add("--ranks", type=int, default=2, metavar="N",
        help="number of processes, which divide the experts (default: %(default)s)")  # fmt: skip
    add("--hidden-size", type=int, default=256, metavar="D",
        help="width of the model; experts have four times that (default: %(default)s)")  # fmt: skip
    add("--seq-length", type=int, default=512, metavar="S",
        help="tokens of a sequence; a rank has two of them (default: %(default)s)")  # fmt: skip
    add("--turns", type=int, default=5, metavar="N",
        help="passes of each workload (default: %(default)s)")  # fmt: skip
    return tool.run(arguments, lambda own: _run(arguments, own))


def _run(arguments: list[str], own: argparse.Namespace) -> int:
    check_positive(own, "ranks", "hidden-size", "seq-length", "turns")
    if own.budget is not None and not own.budget > 0:
        raise InputError(f"--budget is {own.budget}: it must be above 0")
    for text in own.routing:
        parse_forced_routing(text)
    names = [BALANCED, *(name for name in own.routing if name != BALANCED)]
    budgets = [None] if own.budget is None else [None, own.budget]
    task = Task(
        own.expert_selection,
        tuple(ForcedWorkload(name, budget) for name in names for budget in budgets),
        own.hidden_size,
        own.seq_length,
        own.turns,
    )
    facts = about("routing.py", arguments)
    print(f"{facts['command']}   ({facts['date']})\nmachine   {facts['machine']}", flush=True)
    print(f"\n{format_workloads(task, measure_on_ranks(task, own.ranks))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
