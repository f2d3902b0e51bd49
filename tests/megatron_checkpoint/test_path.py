"""The documented path: from Megatron-LM to a run, trained on, to AoE, and back."""

from pathlib import Path

import pytest
import torch

from moe_parallel.huggingface.importing import import_folder, plan_import
from tests.convert.converting import convert_here
from tests.distributed import run_distributed
from tests.huggingface.models import save_with_text
from tests.huggingface.test_path import HEALING, TRAINING
from tests.megatron_checkpoint.models import weights_of
from tests.program import flags, pretrain_here, small_data
from tests.tools.running import run_tool_forked


def _tool(*words: object) -> str:
    result = run_tool_forked("megatron_checkpoint.py", *words)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _converted(run, aoe, options):
    done = convert_here(run, aoe, "aoe", options, rank=24, samples=8)
    return len(done.layers)


@pytest.mark.full
def test_a_checkpoint_is_trained_on_becomes_aoe_and_goes_back(tmp_path: Path) -> None:
    data = small_data(tmp_path)
    theirs = save_with_text("mixtral", tmp_path / "theirs", max_position_embeddings=32).folder
    import_folder(plan_import(theirs, flags(TRAINING)), tmp_path / "start")
    megatron, run, tuned = (tmp_path / name for name in ("megatron", "run", "tuned"))
    assert "weights only" in _tool("export", "--load", tmp_path / "start", "--output", megatron)
    more = flags(TRAINING | {"tokenizer_model": data["tokenizer_model"]})
    _tool("import", "--input", megatron, "--output", run, *more)
    first, again = (weights_of(path / "iter_0000000") for path in (tmp_path / "start", run))
    assert first.keys() == again.keys()
    assert all(torch.equal(tensor, again[key]) for key, tensor in first.items())

    new = TRAINING | HEALING | data | {"config": run / "config.yaml", "load": run, "save": tuned}
    new |= {"finetune": True, "expert_model_parallel_size": 2, "train_iters": 6}
    ((code, printed),) = run_distributed(2, pretrain_here, [new])[0]
    assert code == 0, printed
    assert "6/6" in printed

    options = data | HEALING | {"aoe_low_rank_size": 24}
    assert run_distributed(1, _converted, tuned, tmp_path / "aoe", options) == [2]
    refused = run_tool_forked(
        "megatron_checkpoint.py", "export", "--load", tmp_path / "aoe", "--output", tmp_path / "no"
    )
    assert refused.returncode == 2
    assert "Megatron-LM has no --expert-selection aoe: tools/export_hf.py" in refused.stderr

    # Back in bf16 as Megatron-LM saves it, from a run whose optimizer has fp32 copies.
    new |= {"bf16": True, "save": tmp_path / "bf16"}
    ((code, printed),) = run_distributed(2, pretrain_here, [new])[0]
    assert code == 0, printed
    said = _tool("export", "--load", tmp_path / "bf16", "--output", tmp_path / "back")
    assert "bfloat16, weights only" in said
    _tool("import", "--input", tmp_path / "back", "--output", tmp_path / "again", *more)
    (trained,) = (tmp_path / "bf16").glob("iter_*")
    first, again = (
        weights_of(trained),
        weights_of(tmp_path / "again/iter_0000000"),
    )
    assert {key: tensor.dtype for key, tensor in again.items()} == dict.fromkeys(
        [key for key in first if not key.startswith("optimizer.")], torch.bfloat16
    )
    assert all(torch.equal(tensor, first[key]) for key, tensor in again.items())
