"""The two tiers of the tests, and the tests that need a GPU.

`make test` runs the quick tier; `make test-full`, pytest's `--full`, runs everything. The marks:

- `full`: the test runs only in the full tier. If the command line names the test
  (`pytest tests/test_x.py::test_y`), it runs anyway.
- `covering`: the quick tier runs a subset of the combinations of a test's parameters, chosen by
  tests/tiers.py. Each pair of values occurs in it (`covering(1)`: each value occurs in it). The
  full tier runs the other combinations.
- `gpu`: the test is collected if torch finds a CUDA GPU, or with `--gpu`.
- `cluster`: the test is collected with `--cluster` (`make test-cluster`).

`--share 3/12` keeps, of the tests that carry `full` or `cluster`, one in twelve: those whose names
fall into part 3 of 12. The parts are everything (tests/tiers.py).
"""

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from tests.tiers import Share, covering

LEFT_OUT = pytest.StashKey[dict[str, int]]()
WHY = {
    "full": "left to the full tier (make test-full)",
    "gpu": "not collected: torch sees no CUDA GPU",
    "cluster": "not collected: they run on a Slurm cluster of their own (make test-cluster)",
    "share": "left to the other parts (--share)",
}


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):  # a GPU host may lack pytest-timeout
        parser.addini("timeout", "seconds; has no effect without pytest-timeout")
    parser.addoption("--full", action="store_true", help="run the full tier as well")
    parser.addoption("--gpu", action="store_true", help="collect what needs a GPU without one")
    parser.addoption("--cluster", action="store_true", help="collect what needs a Slurm cluster")
    parser.addoption(
        "--every-layout",
        action="store_true",
        help="run each system in every parallel layout, not in its share of them",
    )
    parser.addoption(
        "--share",
        type=Share.parse,
        metavar="PART/PARTS",
        help="of the full tier and the cluster's tests, one part of so many",
    )
    parser.addoption("--write-table", metavar="FILE", help="page whose table of faults is renewed")


def pytest_configure() -> None:
    # A shell starts background jobs with SIGINT ignored, and their children inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # torch asks the name server for the name of each peer, 127.0.0.1. A lost answer takes 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Imports and collection make a million objects, hardly any of which is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()  # a garbage collection in a test then passes over those objects
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # -m and -k then apply to the marks that are added here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[LEFT_OUT] = {}

    def leave_out(mark: str) -> None:
        _leave_out(mark, lambda item: item.get_closest_marker(mark) is not None, config, items)

    if not (config.getoption("--gpu") or _has_gpu(items)):
        leave_out("gpu")
    if not config.getoption("--cluster"):
        leave_out("cluster")
    # First what takes minutes, so that no worker begins it when the others have ended.
    items.sort(key=lambda item: item.get_closest_marker("full") is None)
    _mark_combinations(items)
    if not (config.getoption("--full") or any("::" in name for name in config.args)):
        leave_out("full")
    if share := config.getoption("--share"):
        shared = ("full", "cluster")
        _leave_out(
            "share",
            lambda item: any(map(item.get_closest_marker, shared)) and not share.holds(item.nodeid),
            config,
            items,
        )


def _leave_out(
    why: str,
    is_left_out: Callable[[pytest.Item], bool],
    config: pytest.Config,
    items: list[pytest.Item],
) -> None:
    left_out = [item for item in items if is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not is_left_out(item)]
    config.stash[LEFT_OUT][why] = len(left_out)


def _has_gpu(items: list[pytest.Item]) -> bool:
    if not any(item.get_closest_marker("gpu") for item in items):
        return False
    import torch  # here, so that the collection of tests that need no torch stays fast

    return torch.cuda.is_available()


def _mark_combinations(items: list[pytest.Item]) -> None:
    """Mark as `full` the combinations outside the covering subset of each `covering` test."""
    tests: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") and hasattr(item, "callspec"):
            tests[item.nodeid.split("[")[0]].append(item)
    for combinations in tests.values():
        rows = [[id(value) for value in item.callspec.params.values()] for item in combinations]
        kept = covering(rows, *combinations[0].get_closest_marker("covering").args)
        for i, item in enumerate(combinations):
            if i not in kept:
                item.add_marker(pytest.mark.full)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Under pytest-xdist each worker collects all tests and finds the same counts."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config: Any = session.config
    if config.getoption("--share") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # a part of few tests may be empty
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = config.stash.get(LEFT_OUT, {})


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for mark, number in config.stash.get(LEFT_OUT, {}).items():
        if number:
            terminalreporter.write_line(f"{mark}: {number} cases {WHY[mark]}")
