"""Checkpoints written during training, as slowly as a test needs.

with slow_writer():          # the thread does nothing before somebody waits for it
    ...
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from moe_parallel.training.checkpoint.saving import Background, HostCopy
from moe_parallel.training.checkpoint.tensors import _WatchedStream


def in_writer() -> bool:
    """Whether this is the thread that writes during training."""
    return threading.current_thread().name.startswith("checkpoint-writer")


@contextlib.contextmanager
def slow_writer() -> Iterator[None]:
    """Inside it, the thread copies no weight before `Background.wait_for_copy` is called, and
    writes no byte of a tensor before `Background.finish`."""
    may_copy, may_write = threading.Event(), threading.Event()

    def after(event: threading.Event, plain: Callable[..., Any]) -> Callable[..., Any]:
        def action(*args: Any) -> Any:
            if in_writer():
                assert event.wait(200)
            return plain(*args)

        return action

    def allowing(plain: Callable[..., Any], *events: threading.Event) -> Callable[..., Any]:
        def action(*args: Any) -> Any:
            for event in events:
                event.set()
            try:
                return plain(*args)
            finally:
                for event in events:
                    event.clear()

        return action

    wait, finish = Background.wait_for_copy, Background.finish
    with (
        mock.patch.object(HostCopy, "copy", after(may_copy, HostCopy.copy)),
        mock.patch.object(_WatchedStream, "_put", after(may_write, _WatchedStream._put)),
        mock.patch.object(Background, "wait_for_copy", allowing(wait, may_copy)),
        mock.patch.object(Background, "finish", allowing(finish, may_copy, may_write)),
    ):
        yield
