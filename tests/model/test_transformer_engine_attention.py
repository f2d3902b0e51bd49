"""--attention-backend transformer_engine with a stand-in for Transformer Engine, and on a GPU."""

import sys
from pathlib import Path

import pytest
import torch

from moe_parallel.errors import InputError
from moe_parallel.optional import INSTALL
from tests.distributed import run_distributed
from tests.model.attention_stand_in import BACKENDS, stand_in
from tests.model.comparison import differences, make_start
from tests.model.small_gpt import Options, Outcome, train_each
from tests.model.test_attention import DOCUMENTS, H, assert_equals_the_definition, attention
from tests.model.test_layouts import LAYOUTS, ONE, model

NAME = "transformer_engine"
OWN = {"reset_attention_mask": True}


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "several"])
@pytest.mark.parametrize("groups", [H, 2, 1])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_equals_the_definition(device: str, groups: int, documents: list[list[int]] | None) -> None:
    if device == "cuda":
        pytest.importorskip(f"{NAME}.pytorch", reason=f"Transformer Engine: {INSTALL[NAME]}")
        assert_equals_the_definition(device, NAME, groups, documents)
    else:
        with stand_in() as engine:
            assert_equals_the_definition(device, NAME, groups, documents)
            assert engine.calls == 1  # for all documents


def _train_with_the_stand_in(cases: dict[str, tuple[Path, Options]]) -> dict[str, Outcome]:
    with stand_in() as engine:
        found = train_each(cases)
        assert engine.calls
    return found


@pytest.mark.full
def test_a_model_trains_as_with_megatrons_attention(tmp_path: Path) -> None:
    """From a checkpoint that another attention wrote, on ranks that share its heads."""
    options = model("topk") | OWN
    begun = make_start(options | {"attention_backend": "local"} | ONE, tmp_path)
    layouts = {name: LAYOUTS[2][name] for name in ("tp2, sp", "pp2, virtual, recompute")}
    jobs = {
        name: (begun.checkpoint, options | {"attention_backend": NAME} | layout)
        for name, layout in layouts.items()
    }
    ranks = run_distributed(2, _train_with_the_stand_in, jobs, timeout=300)
    runs = {name: [rank[name] for rank in ranks] for name in jobs}
    assert differences(runs, begun.on_one_rank) == {}


def test_a_checkpoint_has_nothing_of_it() -> None:
    with stand_in():
        assert attention(NAME, 2).state_dict() == {}


def test_a_cpu_is_refused() -> None:
    with pytest.raises(
        InputError, match=f"^--attention-backend {NAME} is .* needs a GPU: use .*au"
    ):
        attention(NAME, 2, dtype=torch.bfloat16)


def test_fp32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{BACKENDS}.device", lambda: torch.device("cuda"))
    with pytest.raises(InputError, match=f"^--attention-backend {NAME} .* no fp32 .*: set --bf16"):
        attention(NAME, 2)


def test_where_it_is_missing_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{BACKENDS}.device", lambda: torch.device("cuda"))
    monkeypatch.setitem(sys.modules, NAME, None)
    with pytest.raises(InputError, match=f"^--attention-backend {NAME} needs {NAME}, which is not"):
        attention(NAME, 2, dtype=torch.bfloat16)
