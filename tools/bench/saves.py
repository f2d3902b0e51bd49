"""Time synchronous and asynchronous checkpoints in turns, in one run.

    python tools/bench/saves.py                                     # one process, a state of 190 MB
    python tools/bench/saves.py --nproc-per-node 2 --json saves.json
    python tools/bench/saves.py --hidden-size 512                   # a larger state

The run trains on random tokens and saves after every second step, once as without --async-save and
once as with it. The stall is the time for which training stands still: the call, without the flush
of the logs, and the wait of the next update for the copy. Medians, of the rank that took longest.
Flags of the training program and of its launcher are accepted. Exit codes: 0 done, whatever was
measured; 2 a wrong flag.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_parallel.config import read_command_line
from moe_parallel.config.message import counted
from moe_parallel.data.indexed import write_indexed
from moe_parallel.errors import InputError
from moe_parallel.launch.ranks import run_tool_on_ranks
from moe_parallel.tool import Tool, check_positive
from tools.bench.about import about
from tools.bench.save_stalls import SaveTimes, ratios, recording, table

VOCABULARY, TOKENS = 8192, 400_000
MODEL = {
    "num-layers": "4",
    "hidden-size": "256",
    "num-attention-heads": "4",
    "num-experts": "8",
    "moe-ffn-hidden-size": "512",
    "ffn-hidden-size": "1024",
    "seq-length": "256",
    "micro-batch-size": "4",
    "global-batch-size": "8",
    "vocab-size": str(VOCABULARY),
    "tokenizer-type": "NullTokenizer",
}
RUN = {
    "save-interval": "2",
    "keep-last": "1",
    "async-save": "true",
    "eval-iters": "0",
    "log-interval": "1",
    "lr-warmup-iters": "2",
}


def _tool() -> Tool:
    tool = Tool(__file__, __doc__)
    tool.add_argument("--pairs", type=int, default=12, metavar="N",
        help="checkpoints of each kind (default: %(default)s)")  # fmt: skip
    tool.add_argument("--folder", type=Path, metavar="FOLDER",
        help="for the checkpoints, which are deleted (default: a temporary one)")  # fmt: skip
    tool.add_argument("--json", type=Path, metavar="FILE", help="write the samples too")
    return tool


def main(arguments: list[str]) -> int:
    return run_tool_on_ranks(_tool(), __file__, arguments, _check, _work)


def _check(own: argparse.Namespace, flags: Sequence[str]) -> None:
    check_positive(own, "pairs")
    read_command_line(flags)  # an unknown flag is told first
    if own.folder is not None and not own.folder.is_dir():
        raise InputError(f"--folder {own.folder} is not a folder")


def _work(arguments: Sequence[str]) -> int:
    import torch.distributed as dist

    from moe_parallel.collective_errors import exchange

    own, flags = _tool().parse_known_args(list(arguments))
    facts = about("saves.py", sys.argv[1:])
    with tempfile.TemporaryDirectory(dir=own.folder) as place:
        folder = Path(exchange(place)[0])  # that of rank 0
        if dist.get_rank() == 0:
            write_random(folder / "random")
        dist.barrier()
        line = {**MODEL, **RUN, "data-path": str(folder / "random"), "save": str(folder / "run")}
        line["data-cache-path"] = str(folder / "cache")
        line["train-iters"] = str(4 * own.pairs + 1)  # no save at the last one is periodic
        words = [word for name, value in line.items() for word in (f"--{name}", value)]
        record = SaveTimes.slowest(exchange(train([*words, *flags])))
        newest = max((folder / "run").glob("iter_*"))
        size = sum(each.stat().st_size for each in newest.glob("*.distcp"))
        dist.barrier()
    if dist.get_rank() == 0:
        load = ", ".join(f"{each:.1f}" for each in (facts["load_before"][0], os.getloadavg()[0]))
        print(f"{facts['command']}   ({facts['date']})\nmachine   {facts['machine']}\nload {load}")
        ranks = counted(dist.get_world_size(), "rank")
        print(f"state {size / 1e6:.0f} MB on {ranks}; {own.pairs} saves of each kind, in turns\n")
        print(table(record), flush=True)
        if own.json is not None:
            stall, flushed = ratios(record)
            found = {"ratio": stall, "ratio_with_flush": flushed, "bytes": size, **asdict(record)}
            own.json.write_text(json.dumps({"about": facts, **found}, indent=1))
    return 0


def write_random(prefix: Path) -> None:
    generator = np.random.default_rng(0)
    documents = (generator.integers(0, VOCABULARY, 1000).tolist() for _ in range(TOKENS // 1000))
    write_indexed(prefix, documents, VOCABULARY)


def train(flags: Sequence[str]) -> SaveTimes:
    """The record of a run. Raises InputError if the host has no memory for a copy."""
    import torch.distributed as dist

    from moe_parallel.config import validate
    from moe_parallel.parallel import initialize_groups
    from moe_parallel.training.pretrain import pretrain
    from moe_parallel.training.run_config import run_config

    config = run_config(flags).config
    validate(config, dist.get_world_size())
    groups = initialize_groups(config.parallel, config.virtual_stages)
    said = io.StringIO()
    with recording() as record, contextlib.redirect_stdout(said):
        pretrain(config, groups)
    if "training waits for the checkpoint" in said.getvalue():
        raise InputError("the host has no memory for a copy of the state: choose a smaller model")
    return record


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
