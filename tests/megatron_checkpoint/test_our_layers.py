"""A model that was trained in Megatron-LM with our layers becomes a run that computes the same."""

import json
import sys
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from moe_parallel.config import make_config
from moe_parallel.errors import InputError
from moe_parallel.hf import MoeParallelForCausalLM
from moe_parallel.huggingface.export import ExportOptions, export, source_of
from moe_parallel.huggingface.families import Fields
from moe_parallel.megatron import ARGUMENT
from moe_parallel.megatron_checkpoint.arguments import options_of
from moe_parallel.megatron_checkpoint.importing import import_checkpoint, plan_import
from moe_parallel.parallel import destroy_groups
from tests import systems
from tests.distributed import run_distributed
from tests.huggingface.imported import WITHOUT_TEXT, logits_here
from tests.megatron_checkpoint.models import ARGUMENTS
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
    """A trainer with Megatron-LM's arguments, which it saves."""

    def __init__(self, *given: Any) -> None:
        self.arguments = Namespace()
        module: Any = ModuleType("megatron.training.global_vars")
        module._GLOBAL_ARGS = self.arguments
        with mock.patch.dict(sys.modules, {module.__name__: module}):
            super().__init__(*given)

    def generate_state_dict(self, is_loading: bool) -> dict[str, Any]:
        state = super().generate_state_dict(is_loading)
        return state if is_loading else state | {"args": self.all_arguments()}

    def all_arguments(self) -> Namespace:
        values = {each.name: getattr(self.config, each.name) for each in fields(self.config)}
        plain = {key: value for key, value in values.items() if not callable(value)}
        if plain["moe_aux_loss_coeff"] == 0:
            plain["moe_router_load_balancing_type"] = "none"
        return Namespace(
            **plain,
            **vars(self.arguments),
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


def _imported(folder: Path, names: Any) -> dict[str, Path]:
    runs = {}
    for name in names:
        (folder / name / "latest_checkpointed_iteration.txt").write_text("3")
        plan = plan_import(folder / name, WITHOUT_TEXT)
        import_checkpoint(plan, folder / f"{name}-run")
        runs[name] = folder / f"{name}-run"
    return runs


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, FEW), pytest.param(1, ALL, marks=pytest.mark.full)],
    ids=["two ranks", "every system"],
)
def test_logits_are_equal(ranks: int, cases: dict[str, Options], tmp_path: Path) -> None:
    wanted = run_distributed(ranks, _train, cases, tmp_path)[0]
    runs = _imported(tmp_path, cases)
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


def _options(stored: object) -> dict[str, Any]:
    text = json.dumps(stored) if isinstance(stored, dict) else stored
    fields_of_args = Fields(Path("args"), ARGUMENTS["mixtral"] | {ARGUMENT: text})
    return options_of(fields_of_args, has_our_layers=True)


def test_megatron_lms_options_of_other_systems_are_left_out() -> None:
    assert ARGUMENTS["mixtral"]["moe_router_score_function"] == "softmax"
    config = make_config(_options({"expert_selection": "lory", "train_iters": 7}))
    assert config.selection.system == "lory" and config.num_experts == 4
    assert config.training.train_iters != 7  # it is for training


def test_a_bias_may_be_in_the_file_alone() -> None:
    bias = {"moe_router_enable_expert_bias": True}
    given = {"expert_selection": "aoe", "aoe_low_rank_size": 8} | bias
    assert _options(given) | bias == _options(given)


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (None, "args: moe_parallel_config is None: it must be the content of the file"),
        ("{", "args: moe_parallel_config is .*as JSON"),
        ("[[]]", "args: moe_parallel_config is .*as JSON"),
        (7, "args: moe_parallel_config is 7"),
        ({"expert_selection": "my"}, "--expert-selection"),
        ({"expert_selection": "aoe", "aoe_low_rank_size": [1]}, "--aoe-low-rank-size"),
        ({"expert_selection": "aoe", "no_option": 1}, "no.option"),
    ],
)
def test_the_system_is_checked(stored: object, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        make_config(_options(stored))
