"""Our layers in a trainer like Megatron-LM's: it trains the same model as our own program."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed as dist

from moe_parallel.config import make_config
from moe_parallel.errors import InputError
from moe_parallel.megatron import FILE, read_options
from moe_parallel.parallel import destroy_groups
from moe_parallel.telemetry.metrics import loss_names
from tests import systems
from tests.distributed import run_distributed
from tests.megatron_lm import Trainer, core_transformer_config
from tests.model.small_gpt import SIZES, Options, build, micro_batches
from tests.model.test_layouts import layout
from tests.systems import MUON, needs_muon

STEPS, HALF = 10, 5

#: The bias of topk stands still after step 7, so that a resumed run must know its steps.
CASES: dict[str, Options] = {
    "topk": {
        "moe_aux_loss_coeff": 0.05,
        "moe_z_loss_coeff": 0.01,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
        "moe_router_bias_frozen_share": 0.3,
        "moe_layer_freq": "[0]+[1]*3",
    },
    "aoe": systems.options("aoe"),
    "top_p": systems.options("top_p, a moving p"),
    "threshold": systems.options("threshold"),
    "lory": systems.options("lory"),
}
TWO_RANKS: dict[str, Options] = {
    "ep2": layout(ep=2),
    "tp2": layout(tp=2, etp=2),
    "pp2": layout(pp=2, distributed=True),
}
MORE: dict[str, Options] = {
    "etp2": layout(etp=2),
    "tp2, etp1": layout(tp=2),
    "tp2, ep2": layout(tp=2, ep=2),
    "ep2, distributed optimizer": layout(ep=2, distributed=True),
    "pp2, virtual": layout(pp=2, virtual=True),
}
#: Fields of TransformerConfig.
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SELECTIVE = {
    "recompute_granularity": "selective",
    "recompute_modules": ["moe", "shared_experts", "mlp"],
}
PER_TOKEN = {"calculate_per_token_loss": True}


class Outcome(NamedTuple):
    losses: list[float]  # of each step, per token
    auxiliary: list[dict[str, float]]  # of each step: mean over layers and micro-batches


Outcomes = dict[str, Outcome]


def train_own(cases: Options, steps: int = STEPS) -> Outcomes:
    """What our own program gives on one rank."""
    return {name: _own(case, steps) for name, case in cases.items()}


def train(cases: dict[str, tuple[Options, Options]], folder: Path) -> Outcomes:
    """What the trainer gives for (options, fields of TransformerConfig)."""
    return {name: _trained(case, flags, folder) for name, (case, flags) in cases.items()}


def train_and_resume(cases: Options, folder: Path) -> Outcomes:
    """The cases with ep, and their second half again with tp."""
    found = {}
    for name, case in cases.items():
        ep, tp = layout(ep=1 if systems.merges(name) else 2), layout(tp=2, etp=2)
        found[f"{name}: ep2"] = _trained(case | ep, {}, folder, save=folder / name)
        found[f"{name}: resumed"] = _trained(case | tp, {}, folder, load=folder / name)
    return found


def _own(options: Options, steps: int) -> Outcome:
    config = _config(options)
    engine = build(config)
    found = Outcome([], [])
    for step in range(steps):
        found.losses.append(engine.step(micro_batches(config, 4 * step, engine)).lm_loss)
        layers = engine.statistics.training.reduced([None]).summaries()
        engine.statistics.training.clear()
        names = [name for name in loss_names() if name in layers[-1]]
        found.auxiliary.append(
            {name: sum(layer[name] for layer in layers) / len(layers) for name in names}
        )
    destroy_groups()
    return found


def _trained(
    options: Options,
    flags: Options,
    folder: Path,
    save: Path | None = None,
    load: Path | None = None,
) -> Outcome:
    trainer = Trainer(_config(options), folder / f"{dist.get_rank()}.yaml", flags)
    if load is not None:
        trainer.load_checkpoint(load)
    found = Outcome([], [])
    while trainer.iteration < STEPS:
        found.losses.append(trainer.train_step())
        found.auxiliary.append(trainer.training_log())
        if trainer.iteration == HALF:
            trainer.evaluate()  # it changes nothing
            if save is not None:
                trainer.save_checkpoint(save)
    destroy_groups()
    return found


def _config(options: Options) -> Any:
    return make_config(SIZES | {"train_iters": STEPS} | options)


@pytest.fixture(scope="module")
def own() -> Outcomes:
    (found,) = run_distributed(1, train_own, CASES)
    return found


def check(found: Outcomes, own: Outcomes) -> None:
    wrong = []
    for name, outcome in found.items():
        expected = own[name.split(":")[0]]
        steps = len(outcome.losses)
        if outcome.losses != pytest.approx(expected.losses[-steps:], rel=1e-5):
            wrong.append(f"{name}: {outcome.losses}, not {expected.losses[-steps:]}")
        for here, of_step in zip(outcome.auxiliary, expected.auxiliary[-steps:], strict=True):
            # The tracker keeps the names of earlier cases.
            if {loss: here.get(loss) for loss in of_step} != pytest.approx(of_step, rel=1e-4):
                wrong.append(f"{name}: {here}, not {of_step}")
    assert not wrong, "\n".join(wrong)


def test_losses_are_those_of_our_own_program_on_one_rank(own: Outcomes, tmp_path: Path) -> None:
    cases = {name: (case, {}) for name, case in CASES.items()}
    (found,) = run_distributed(1, train, cases, tmp_path)
    check(found, own)


def test_losses_are_those_of_our_own_program_on_two_ranks(own: Outcomes, tmp_path: Path) -> None:
    cases = {
        f"{name}: {where}": (case | its, {})
        for name, case in CASES.items()
        for where, its in TWO_RANKS.items()
        if where != "ep2"
    }
    found, _ = run_distributed(2, train, cases, tmp_path)
    check(found, own)


def test_a_run_with_ep_resumes_with_tp(own: Outcomes, tmp_path: Path) -> None:
    found, _ = run_distributed(2, train_and_resume, CASES, tmp_path)
    check(found, own)


@needs_muon
def test_its_muon_takes_each_expert_by_itself(tmp_path: Path) -> None:
    case = {"aoe": CASES["aoe"] | MUON}
    (own,) = run_distributed(1, train_own, case)
    for found in run_distributed(2, train_and_resume, case, tmp_path):
        check(found, own)


@pytest.mark.full
def test_losses_are_the_same_in_more_layouts_and_with_recomputation(
    own: Outcomes, tmp_path: Path
) -> None:
    cases = {
        f"{name}: {where}": (case | its, {})
        for name, case in CASES.items()
        for where, its in MORE.items()
        if where == "pp2, virtual" or not systems.merges(name)  # others divide experts otherwise
    }
    for name, case in CASES.items():
        for flags in (FULL, SELECTIVE):
            cases[f"{name}: recomputed, {flags['recompute_granularity']}"] = (
                case | layout(pp=2),
                flags,
            )
    found, _ = run_distributed(2, train, cases, tmp_path)
    check(found, own)


def per_token(folder: Path) -> tuple[list[float], list[float]]:
    """The losses of steps in which every token counts, without and with the flag."""
    options = CASES["topk"] | layout(tp=2, etp=2) | {"moe_aux_loss_coeff": 1.0}
    found = []
    for flags in ({}, PER_TOKEN):
        trainer = Trainer(_config(options), folder / f"{dist.get_rank()}.yaml", flags)
        trainer.batches = _unmasked
        found.append([trainer.train_step() for _ in range(3)])
        destroy_groups()
    return tuple(found)


def _unmasked(*arguments: Any) -> Iterator[dict[str, torch.Tensor]]:
    for batch in micro_batches(*arguments):
        yield batch | {"loss_mask": torch.ones_like(batch["loss_mask"])}


def test_a_loss_per_token_weighs_auxiliary_losses_as_before(tmp_path: Path) -> None:
    (without, with_flag), _ = run_distributed(2, per_token, tmp_path)
    assert with_flag == pytest.approx(without, rel=1e-5)


@pytest.mark.parametrize(
    ("file", "flags", "message"),
    [
        (
            "moe_router_topk: 4",
            {},
            "moe-router-topk is 4, but Megatron-LM's --moe-router-topk is 2",
        ),
        ("num_experts: 8", {}, "num-experts is 8, but Megatron-LM's --num-experts is 4"),
        ("moe_layer_freq: '[1,0,1,0]'", {}, "--moe-layer-freq is '1'"),
        ("lr: 0.1", {}, "lr belongs to Megatron-LM's flags"),
        ("expert_selection: aoe\nmoe_top_p: 0.1", {}, "--moe-top-p is 0.1, but it belongs to"),
        ("expert_selection: hash", {}, "hash needs the ids of the tokens"),
        ("moe_router_trace: /tmp/t", {}, "--moe-router-trace works in pretrain_gpt_moe.py alone"),
        ("", {}, "add train-iters, the number of optimizer steps"),
        ("expert_selection: lory", {"moe_z_loss_coeff": 0.1}, "--moe-z-loss-coeff is 0.1, but"),
        ("", {"moe_router_topk_scaling_factor": 2.5}, "--moe-router-topk-scaling-factor is 2.5"),
        ("", {"gated_linear_unit": False}, "add --swiglu"),
        ("", {"num_moe_experts": None, "moe_ffn_hidden_size": None}, "set --num-experts"),
        ("moe_shared_expert_intermediate_size: 64", {}, "is 64, but Megatron-LM's"),
        ("", {"moe_router_load_balancing_type": "sinkhorn"}, "it takes one of aux_loss"),
    ],
)
def test_one_line_tells_what_does_not_fit(
    file: str, flags: Options, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _small(tmp_path, monkeypatch, file, flags)
    with pytest.raises(InputError) as error:
        read_options(config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_file_may_repeat_flags_and_add_a_bias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-LM accepts its own flag for a bias with sigmoid scores only."""
    file = (
        "num_experts: 4\nmoe_layer_freq: '[1]*4'\nmoe_router_enable_expert_bias: true\n"
        "moe_router_bias_update_rate: none\ntrain_iters: 50\nmoe_backend: reference"
    )
    options = read_options(_small(tmp_path, monkeypatch, file, {"moe_z_loss_coeff": 0.5}))
    assert options.selection.moe_router_enable_expert_bias
    assert options.selection.moe_router_bias_update_rate is None
    assert options.selection.moe_z_loss_coeff == 0.5
    assert options.selection.moe_aux_loss_coeff == 0.0  # Megatron-LM's default, not ours
    assert (options.moe.moe_backend, options.training.train_iters) == ("reference", 50)


def test_a_file_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _small(tmp_path, monkeypatch, "", {})
    monkeypatch.delenv(FILE)
    with pytest.raises(InputError, match=f"{FILE} is not set"):
        read_options(config)


def _small(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, flags: Options
) -> TransformerConfig:
    monkeypatch.setenv(FILE, "")
    given = _config({})
    selection = replace(given.selection, moe_aux_loss_coeff=0.0)
    file = folder / "options.yaml"
    config = core_transformer_config(replace(given, selection=selection), file, flags)
    file.write_text(text)
    return config
