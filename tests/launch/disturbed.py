"""The program, in which one rank behaves badly: `DISTURB="forward 1" python disturbed.py ...`.

DISTURB names a function of this file and a rank. It is called once on that rank: in the first start
of a job, in a folder that contains `started` afterwards.
"""

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moe_parallel.launch.program import main


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def compute_for_a_while() -> None:
    """Longer than --hang-timeout of the tests."""
    end = time.monotonic() + 15
    while time.monotonic() < end:
        pass


def replace(owner: Any, name: str, number: int, action: Callable[[], None]) -> None:
    """Call `action` before the call of a function that has this number, from 1."""
    plain, calls = getattr(owner, name), []

    def replacement(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == number:
            Path("started").touch()
            action()
        return plain(*args, **kwargs)

    setattr(owner, name, replacement)


def set_up() -> None:
    from moe_parallel.training import pretrain

    replace(pretrain, "begin_run", 1, sleep_for_ever)


def data() -> None:
    from moe_parallel.data import sampler

    replace(sampler, "_stack", 2 * 2 + 1, sleep_for_ever)


def forward() -> None:
    from moe_parallel.model import forward

    replace(forward, "own_documents", 2 * 2 + 1, sleep_for_ever)


def save() -> None:
    from moe_parallel.training.checkpoint import writer

    replace(writer, "write_tensors", 1, sleep_for_ever)


def evaluation() -> None:
    from moe_parallel.evaluation import text_loss

    replace(text_loss, "_padded", 1, sleep_for_ever)


def slow_steps() -> None:
    """Every micro-batch of this rank takes half a second more."""
    be_slower(0.5)


def slower_steps() -> None:
    """A run of the tests on a cluster then takes longer than a limit of 15 seconds."""
    be_slower(2)


def be_slower(seconds: float) -> None:
    from moe_parallel.model import forward

    plain = forward.own_documents

    def slowly(*args: Any, **kwargs: Any) -> Any:
        Path("started").touch()
        time.sleep(seconds)
        return plain(*args, **kwargs)

    forward.own_documents = slowly


def long_save() -> None:
    from moe_parallel.training.checkpoint import writer

    replace(writer, "write_tensors", 1, compute_for_a_while)


def slow_evaluation() -> None:
    from moe_parallel.evaluation import text_loss

    plain = text_loss._padded

    def slowly(stream: Any) -> Any:
        for batch in plain(stream):
            time.sleep(1)
            yield batch

    text_loss._padded = slowly


def poison() -> None:
    """Make a weight of this rank NaN, as a faulty memory can."""
    weights = [each for each in gc.get_objects() if isinstance(each, torch.nn.Parameter)]
    with torch.no_grad():
        weights[0].fill_(torch.nan)


def nan_in_a_step() -> None:
    from moe_parallel.model import forward

    replace(forward, "own_documents", 2 * 2 + 1, poison)


def nan_in_a_save() -> None:
    from moe_parallel.training import saves

    replace(saves.Saves, "save", 2, poison)


def nan_in_an_evaluation() -> None:
    from moe_parallel.evaluation import text_loss

    replace(text_loss, "_padded", 1, poison)


if __name__ == "__main__":
    what, rank = os.environ["DISTURB"].split()
    here = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")  # neither: a launcher
    if here == rank and not os.path.exists("started"):
        from moe_parallel.platform.import_megatron import import_megatron

        import_megatron()
        globals()[what]()
    main(__file__, sys.argv[1:])
