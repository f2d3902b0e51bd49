"""A model that was trained in Megatron-LM with our layers becomes a run that computes the same."""

from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import distributed as dist

from moe_parallel.config import make_config
from moe_parallel.errors import InputError
from moe_parallel.hf import MoeParallelForCausalLM
from moe_parallel.huggingface.export import ExportOptions, export, source_of
from moe_parallel.megatron import FILE
from moe_parallel.megatron_checkpoint.importing import import_checkpoint, plan_import
from moe_parallel.parallel import destroy_groups
from tests import systems
from tests.distributed import run_distributed
from tests.huggingface.imported import WITHOUT_TEXT, logits_here
from tests.megatron_lm import SPEC, Trainer
from tests.model.small_gpt import SIZES, VOCABULARY, Options
from tests.model.test_layouts import layout

TOKENS = torch.arange(2 * 8).mul(7).remainder(VOCABULARY).view(2, 8)
FEW: dict[str, Options] = {
    "aoe": systems.options("aoe"),
    "topk": systems.options("topk, sigmoid, groups, bias, shared expert")
    | {"moe_layer_freq": "[0]+[1]*3", "moe_aux_loss_coeff": 0.0},
}
#: `hash` is refused in Megatron-LM, and one expert a token, too.
ALL = {
    name: systems.options(name)
    for name in systems.SYSTEMS
    if name != "hash" and "one expert" not in name
}


class Saving(Trainer):
    """A trainer that saves Megatron-LM's arguments, too."""

    def generate_state_dict(self, is_loading: bool) -> dict[str, Any]:
        state = super().generate_state_dict(is_loading)
        return state if is_loading else state | {"args": self.arguments()}

    def arguments(self) -> Namespace:
        values = {each.name: getattr(self.config, each.name) for each in fields(self.config)}
        plain = {key: value for key, value in values.items() if not callable(value)}
        if plain["moe_aux_loss_coeff"] == 0:
            plain["moe_router_load_balancing_type"] = "none"
        return Namespace(
            **plain,
            spec=SPEC,
            num_experts=self.config.num_moe_experts,
            group_query_attention=True,
            swiglu=True,
            position_embedding_type="rope",
            rotary_percent=1.0,
            seq_length=self.options.training.seq_length,
            max_position_embeddings=self.options.training.seq_length,
            untie_embeddings_and_output_weights=False,
        )


def _train(cases: dict[str, Options], folder: Path) -> dict[str, torch.Tensor]:
    """Train each for three steps, with ep on all ranks, and save; the logits [B, S, V]."""
    logits = {}
    for name, case in cases.items():
        ep = dist.get_world_size()
        (folder / name).mkdir(exist_ok=True)
        rank = folder / name / f"{dist.get_rank()}.yaml"
        config = make_config(SIZES | {"train_iters": 3} | case | layout(ep=ep))
        trainer = Saving(config, rank, {})
        while trainer.iteration < 3:
            trainer.train_step()
        trainer.save_checkpoint(folder / name / "iter_0000003")
        model = trainer.model[0].eval()
        with torch.no_grad():
            logits[name] = model(TOKENS, torch.arange(TOKENS.shape[1]).expand(2, -1), None)
        destroy_groups()
    return logits


def _logits(folders: dict[str, Path]) -> dict[str, torch.Tensor]:
    return {name: logits_here(folder, TOKENS) for name, folder in folders.items()}


def _imported(folder: Path, names: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    runs = {}
    for name in names:
        (folder / name / "latest_checkpointed_iteration.txt").write_text("3")
        monkeypatch.setenv(FILE, str(folder / name / "0.yaml"))
        plan = plan_import(folder / name, WITHOUT_TEXT)
        import_checkpoint(plan, folder / f"{name}-run")
        runs[name] = folder / f"{name}-run"
    return runs


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, FEW), pytest.param(1, ALL, marks=pytest.mark.full)],
    ids=["two ranks", "every system"],
)
def test_logits_are_equal(
    ranks: int, cases: dict[str, Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run_distributed(ranks, _train, cases, tmp_path)[0]
    runs = _imported(tmp_path, cases, monkeypatch)
    (found,) = run_distributed(1, _logits, runs)
    for name, theirs in wanted.items():
        assert theirs.std() > 0.1, f"{name}: logits near 0 would hide an error"
        torch.testing.assert_close(found[name], theirs, atol=1e-5, rtol=0, msg=name)
        if cases is FEW:
            target = tmp_path / f"{name}-hf"
            export(source_of(str(runs[name])), target, ExportOptions(architecture="own"))
            model = MoeParallelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
            with torch.no_grad():
                logits = model(TOKENS).logits
            torch.testing.assert_close(logits, theirs, atol=1e-5, rtol=0, msg=name)


def test_the_file_of_the_training_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_distributed(1, _train, {"aoe": FEW["aoe"]}, tmp_path)
    theirs, file = tmp_path / "aoe/iter_0000003", tmp_path / "aoe/0.yaml"
    good = yaml.safe_load(file.read_text())

    def refused(reason: str, options: Options | None) -> None:
        if options is not None:
            file.write_text(yaml.dump(options))
        with pytest.raises(InputError, match=reason):
            import_checkpoint(plan_import(theirs, WITHOUT_TEXT), tmp_path / "run")
        assert not (tmp_path / "run").exists()

    monkeypatch.delenv(FILE, raising=False)
    refused("MOE_PARALLEL_CONFIG is not set: let it name a YAML file", None)
    monkeypatch.setenv(FILE, str(file))
    refused("num-experts is 8, but Megatron-LM's --num-experts is 4", good | {"num_experts": 8})
    refused("lr belongs to Megatron-LM's flags", good | {"lr": 0.1})
    refused(r"w_down_EDR is \[4, 32, 8\], and by the model's sizes it is \[4, 32, 16\]",
            good | {"aoe_low_rank_size": 16})  # fmt: skip
    refused(r"mlp.w_router_ED is missing.*MOE_PARALLEL_CONFIG", {"expert_selection": "topk"})
