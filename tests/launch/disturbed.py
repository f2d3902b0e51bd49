"""The program, in which one rank behaves badly: `DISTURB="forward 1" python disturbed.py ...`.

DISTURB names a function of this file and a rank. It is called once on that rank: in the first start
of a job, in a folder that contains `started` as soon as the rank behaves badly.

A rank that pauses waits at a moment for what a test then does to the job: until the folder contains
`go_on`, or until the rank is asked to stop, but at most two minutes. `left` says which it was.
"""

import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_parallel.launch.program import main

PAUSE_SECONDS = 120  # at most


def sleep_for_ever() -> None:
    Path("started").touch()
    while True:
        time.sleep(1)


def compute_for_a_while() -> None:
    """Longer than --hang-timeout of the tests."""
    Path("started").touch()
    end = time.monotonic() + 15
    while time.monotonic() < end:
        pass


def pause() -> None:
    Path("started").touch()
    stop: Any = signal.getsignal(signal.SIGTERM).__self__  # type: ignore[union-attr]
    end, why = time.monotonic() + PAUSE_SECONDS, "late"
    try:
        while stop.signal is None and time.monotonic() < end:  # a signal may also raise here
            if Path("go_on").exists():
                why = "told to go on"
                break
            time.sleep(0.02)
    finally:
        Path("left").write_text(why if stop.signal is None else "asked to stop")


def on_call(owner: Any, name: str, number: int, action: Callable[[], None]) -> None:
    """Call `action` before the call of a function that has this number, from 1."""
    plain, calls = getattr(owner, name), []

    def replacement(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == number:
            action()
        return plain(*args, **kwargs)

    setattr(owner, name, replacement)


def pause_at_start() -> None:
    """Before Megatron-Core is imported, so before the ranks have met."""
    from moe_parallel.platform import megatron as module

    on_call(module, "import_megatron", 1, pause)


def pause_in_a_step() -> None:
    """In the forward pass of iteration 5's second micro-batch, after the first one's backward."""
    from moe_parallel.model import forward
    from moe_parallel.training.engine import Engine

    on_call(Engine, "step", 5, lambda: on_call(forward, "own_documents", 2, pause))


def pause_in_a_save() -> None:
    """In the second save, when this rank has written some tensors."""
    from torch.distributed.checkpoint import filesystem

    from moe_parallel.training.checkpoint import saving as writer

    on_call(writer, "write_tensors", 2, lambda: on_call(filesystem, "_write_item", 8, pause))


def pause_in_an_evaluation() -> None:
    """Before the fourth micro-batch of the first evaluation."""
    from moe_parallel.evaluation import text_loss
    from moe_parallel.model import forward

    on_call(text_loss, "_padded", 1, lambda: on_call(forward, "own_documents", 4, pause))


def set_up() -> None:
    from moe_parallel.training import pretrain

    on_call(pretrain, "begin_run", 1, sleep_for_ever)


def data() -> None:
    from moe_parallel.data import sampler

    on_call(sampler, "_stack", 2 * 2 + 1, sleep_for_ever)


def forward() -> None:
    from moe_parallel.model import forward

    on_call(forward, "own_documents", 2 * 2 + 1, sleep_for_ever)


def save() -> None:
    from moe_parallel.training.checkpoint import saving as writer

    on_call(writer, "write_tensors", 1, sleep_for_ever)


def evaluation() -> None:
    from moe_parallel.evaluation import text_loss

    on_call(text_loss, "_padded", 1, sleep_for_ever)


def slow_steps() -> None:
    """Every micro-batch of this rank takes a fifth of a second more."""
    be_slower(0.2)


def slower_steps() -> None:
    """The first start of a job of the tests on a cluster then takes longer than a minute."""
    if not int(os.environ.get("SLURM_RESTART_COUNT", "0")):
        be_slower(4)


def be_slower(seconds: float) -> None:
    from moe_parallel.model import forward

    plain = forward.own_documents

    def slowly(*args: Any, **kwargs: Any) -> Any:
        Path("started").touch()
        time.sleep(seconds)
        return plain(*args, **kwargs)

    forward.own_documents = slowly


def long_save() -> None:
    from moe_parallel.training.checkpoint import saving as writer

    on_call(writer, "write_tensors", 1, compute_for_a_while)


def slow_writes() -> None:
    """A save in which little is computed, and a file grows."""
    from moe_parallel.training.checkpoint import saving as writer

    def write() -> None:
        with open(os.devnull, "wb") as file:
            for _ in range(150):
                file.write(bytes(1 << 20))
                time.sleep(0.1)

    on_call(writer, "write_tensors", 1, write)


def hold_the_interpreter() -> None:
    """Native code that keeps Python's threads from going on: longer than --hang-timeout."""
    from moe_parallel.model import forward

    def hold() -> None:
        Path("started").touch()
        ctypes.PyDLL(None).sleep(600)

    on_call(forward, "own_documents", 2 * 2 + 1, hold)


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
    import torch  # only here: a launcher handles signals from its first second on

    Path("started").touch()
    weights = [each for each in gc.get_objects() if isinstance(each, torch.nn.Parameter)]
    with torch.no_grad():
        weights[0].fill_(torch.nan)


def nan_in_a_step() -> None:
    from moe_parallel.model import forward

    on_call(forward, "own_documents", 2 * 2 + 1, poison)


def nan_in_a_save() -> None:
    from moe_parallel.training import loop

    on_call(loop.Saves, "save", 2, poison)


def nan_in_an_evaluation() -> None:
    from moe_parallel.evaluation import text_loss

    on_call(text_loss, "_padded", 1, poison)


if __name__ == "__main__":
    what, rank = os.environ["DISTURB"].split()
    is_launcher = "RANK" not in os.environ and "--nproc-per-node" in sys.argv
    here = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
    if here == rank and not is_launcher and not os.path.exists("started"):
        if what != "pause_at_start":
            from moe_parallel.platform.megatron import import_megatron

            import_megatron()
        globals()[what]()
    main(__file__, sys.argv[1:])
