"""--deterministic-mode: the settings, and what it refuses."""

import os
from collections.abc import Iterator

import pytest
import torch

from moe_parallel.config import make_config
from moe_parallel.errors import InputError
from moe_parallel.platform.determinism import VARIABLES, be_deterministic

EXPERTS = {"num_experts": 4}


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The settings of the process are restored; no variable is set before a test."""
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is restored
        monkeypatch.delenv(variable)
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark


def test_what_it_sets() -> None:
    torch.backends.cudnn.benchmark = True
    be_deterministic(make_config({}))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["NCCL_ALGO"] == "Ring"
    assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", "set it to :4096:8 or :16:8, or remove it"),
        ("NCCL_ALGO", "NVLS", "set it to Ring or Tree or .*, or remove it"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", "set it to 0, or remove it"),
    ],
)
def test_variables_that_ask_for_something_else(
    name: str, value: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    message = f"--deterministic-mode: the environment variable {name} is '{value}': {remedy}"
    with pytest.raises(InputError, match=message) as caught:
        be_deterministic(make_config({}))
    assert str(caught.value).isprintable()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("system", ["top_p", "aoe_top_p"])
def test_a_system_that_torch_cannot_compute_deterministically_on_a_gpu(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EXPERTS | {"expert_selection": system}
    if system.startswith("aoe"):
        options |= {"aoe_low_rank_size": 8}
    be_deterministic(make_config(options))  # on a CPU it can
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InputError, match=f"--expert-selection {system} .* choose another system"):
        be_deterministic(make_config(options))
    be_deterministic(make_config(EXPERTS))
