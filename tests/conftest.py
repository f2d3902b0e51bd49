"""What every test shares: the marks `slow` and `gpu`.

`slow` tests run with `--slow` (`make test-slow`); `gpu` tests run where torch sees a CUDA GPU.
Elsewhere both are skipped, and pytest's summary says why.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        _skip_marked(items, "slow", "slow: run it with --slow or `make test-slow`")
    if any(item.get_closest_marker("gpu") for item in items) and not _has_gpu():
        _skip_marked(items, "gpu", "needs a CUDA GPU, and torch sees none here")


def _skip_marked(items: list[pytest.Item], mark: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(mark):
            item.add_marker(pytest.mark.skip(reason=reason))


def _has_gpu() -> bool:
    import torch  # here, so that collecting tests that need no torch stays quick

    return torch.cuda.is_available()
