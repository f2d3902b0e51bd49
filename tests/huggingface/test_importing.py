"""A model of transformers becomes a run folder that computes the same in every layout."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers  # its models are imported at use, not by every rank that imports this module
from torch.nn.functional import cross_entropy

from moe_parallel.huggingface.importing import import_folder, plan_import
from moe_parallel.huggingface.weights import TensorFolder
from moe_parallel.training.checkpoint import tensors as checkpoint_tensors
from moe_parallel.training.checkpoint.record import read_record
from tests.distributed import run_distributed
from tests.huggingface.imported import WITHOUT_TEXT, logits_here, losses_here, run_of
from tests.huggingface.models import MODELS, Saved, build, save, save_with_text, text_tokenizer

TOLERANCE = 1e-5  # absolute, in fp32; logits are up to 5, and measured differences up to 4e-6

Models = Callable[[str], tuple[Saved, Path]]  # by model_type: as saved, and imported


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    @cache
    def of(model_type: str) -> tuple[Saved, Path]:
        folder = tmp_path_factory.mktemp(model_type)
        saved = save(build(model_type), folder / "theirs")
        return saved, run_of(saved, folder / "run")

    return of


def _logits_of_each(jobs):
    return [logits_here(run, saved.tokens_BS) for saved, run in jobs]


def test_the_logits_are_those_of_transformers(models: Models) -> None:
    jobs = [models(model_type) for model_type in MODELS]
    (found,) = run_distributed(1, _logits_of_each, jobs)
    for model_type, (saved, _), logits in zip(MODELS, jobs, found, strict=True):
        wanted = saved.logits_BSV
        assert wanted.abs().max() > 1, f"{model_type}: logits near 0 would hide an error"
        torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0, msg=model_type)


def _layout(tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1, *, sp: bool = False):
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "sequence_parallel": sp,
    }


#: By the number of ranks: model_type and layout. Each division of a weight occurs.
LAYOUTS = {
    2: [
        ("mixtral", _layout(ep=2)),
        ("mixtral", _layout(tp=2, etp=2)),
        ("qwen2_moe", _layout(tp=2)),
        ("qwen2_moe", _layout(pp=2)),
        ("qwen3_moe", _layout(tp=2, ep=2)),
        ("olmoe", _layout(tp=2)),
        ("llama", _layout(pp=2)),
        ("qwen3", _layout(tp=2)),
    ],
    4: [
        (model_type, _layout(tp=2, pp=2, etp=2))
        for model_type in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
    ]
    + [(model_type, _layout(tp=2, pp=2)) for model_type in ("llama", "qwen2", "qwen3")]
    + [("mixtral", _layout(ep=2, etp=2)), ("olmoe", _layout(tp=2, ep=4))],
}


def _losses_of_each(jobs):
    return [losses_here(run, saved.tokens_BS, layout) for saved, run, layout in jobs]


@pytest.mark.full
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_it_loads_in_any_layout(ranks: int, models: Models) -> None:
    jobs = [(*models(model_type), layout) for model_type, layout in LAYOUTS[ranks]]
    for (model_type, layout), (saved, *_), found in zip(
        LAYOUTS[ranks], jobs, zip(*run_distributed(ranks, _losses_of_each, jobs), strict=True),
        strict=True,
    ):  # fmt: skip
        wanted = cross_entropy(
            saved.logits_BSV[:, :-1].transpose(1, 2), saved.tokens_BS[:, 1:], reduction="none"
        )
        on_last_stage = [losses for losses in found if losses is not None]
        assert on_last_stage
        for losses in on_last_stage:
            torch.testing.assert_close(
                losses, wanted, atol=TOLERANCE, rtol=0, msg=f"{model_type} in {layout}"
            )


def test_a_folder_of_several_files_in_bf16(tmp_path: Path) -> None:
    model = build("mixtral").to(torch.bfloat16)
    saved = save(model, tmp_path / "theirs", max_shard_size="20KB")
    # transformers in fp32, with the rounded weights.
    model = transformers.MixtralForCausalLM.from_pretrained(
        saved.folder, dtype=torch.float32
    ).eval()
    assert len(list(saved.folder.glob("*.safetensors"))) > 2
    plan = plan_import(saved.folder, WITHOUT_TEXT)
    assert plan.config.training.bf16
    imported = import_folder(plan, tmp_path / "run")
    assert imported.dtypes == ("bfloat16",)
    with torch.no_grad():
        wanted = model(saved.tokens_BS).logits
    ((found,),) = run_distributed(1, _logits_of_each, [(saved, tmp_path / "run")])
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


def test_one_part_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    saved = save(build("mixtral"), tmp_path / "theirs")
    alive: dict[int, int] = {}
    most = 0
    read = TensorFolder.read

    def counted(self, name):
        nonlocal most
        tensor = read(self, name)
        alive[id(tensor)] = tensor.nbytes
        weakref.finalize(tensor, alive.pop, id(tensor))
        most = max(most, sum(alive.values()))
        return tensor

    monkeypatch.setattr(TensorFolder, "read", counted)
    monkeypatch.setattr(checkpoint_tensors, "FILE_BYTES", 30_000)
    run = run_of(saved, tmp_path / "run")
    largest = 96 * 32 * 4  # the embedding
    assert largest <= most <= 2 * largest
    stored = {file.name: file.stat().st_size for file in run.glob("iter_0000000/*.distcp")}
    assert len(stored) > 2
    del stored[f"__{len(stored) - 1}_0.distcp"]  # the last one has the rest
    assert all(30_000 <= size < 60_000 for size in stored.values())


def test_the_run_folder(tmp_path: Path) -> None:
    saved = save_with_text("qwen3_moe", tmp_path / "theirs", initializer_range=0.05)
    plan = plan_import(saved.folder, ["--lr-warmup-iters", "7", "--seq-length", "16"])
    imported = import_folder(plan, tmp_path / "run")
    assert imported.checkpoint == tmp_path / "run" / "iter_0000000"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "config.yaml",
        "iter_0000000",
        "latest_checkpointed_iteration.txt",
        "tokenizer",
    ]
    assert [path.name for path in tmp_path.iterdir() if path.name[0] == "."] == []
    record = read_record(imported.checkpoint)
    assert record["adam_step"] is None and record["training"]["iteration"] == 0
    assert record["fingerprint"]["--vocab-size"] == text_tokenizer().vocab_size
    config = plan.config
    assert (config.optimizer.lr_warmup_iters, config.training.seq_length) == (7, 16)
    assert config.model.init_method_std == 0.05
    total = sum(weight.numel() for weight in build("qwen3_moe", vocab_size=1).parameters())
    more = 2 * 32 * (text_tokenizer().vocab_size - 1)  # rows of the embedding and of the output
    assert imported.parameters == total + more
    assert json.loads((saved.folder / "config.json").read_text())["model_type"] == "qwen3_moe"
