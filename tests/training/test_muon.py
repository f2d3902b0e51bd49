"""Megatron-Core's Muon with our weights. Of two axes, Megatron-Core's own code moves them."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint.record import Expected
from moe_parallel.training.optimizer import optimizer_parts
from tests import systems
from tests.distributed import run_distributed
from tests.systems import MUON, SYSTEMS, needs_muon
from tests.tiers import rest_in_full
from tests.training.tiny_run import AOE, GATHERED, TINY, Layout, TinyRun

pytestmark = needs_muon

STEPS, HALF = 4, 2
#: Gradients reach the optimizer as they are.
RUN = MUON | {"clip_grad": 0.0, "lr_warmup_iters": 1}
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


def by_hand(momentum_OI: torch.Tensor, scale: float) -> torch.Tensor:
    """Five quintic iterations of Newton and Schulz in fp64, times `scale`."""
    x = momentum_OI.double() / momentum_OI.double().norm()
    for a, b, c in (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x * scale


def spectral(out: int, into: int) -> float:
    return max(out, into) ** 0.5


def shape_scaling(out: int, into: int) -> float:
    return 0.2 * max(1.0, out / into) ** 0.5


def experts(weight: torch.Tensor) -> list[torch.Tensor]:
    """The matrix of each expert, outputs first."""
    return [expert.flatten(1).T for expert in weight]


def heads(weight: torch.Tensor) -> list[torch.Tensor]:
    """Q, K and V; two groups of two query heads each, heads of eight numbers."""
    assert len(weight) == 2 * 32
    groups = weight.unflatten(0, (2, 32))
    return [groups[:, a:b].flatten(0, 1) for a, b in pairwise((0, 16, 24, 32))]


CASES = {
    "topk": (
        {},
        spectral,
        {"decoder.layers.1.mlp.experts.w_gate_up_LD2F": experts, QKV: heads},
    ),
    "aoe, with Nesterov's momentum": (
        AOE
        | {"muon_nesterov": True, "muon_momentum": 0.8, "weight_decay": 0.0}
        | {"muon_scale_mode": "shape_scaling", "muon_extra_scale_factor": 0.2},
        shape_scaling,
        {
            "decoder.layers.1.mlp.w_down_EDR": experts,
            "decoder.layers.1.mlp.experts.w_p_LDW": experts,
            "decoder.layers.1.mlp.experts.w_out_LWD": experts,
        },
    ),
}


def _three_steps(folder: Path, options: dict, names: list[str]) -> dict:
    """By name: the weight before and after three steps, and gradient and learning rate of each."""
    run = TinyRun(Layout(), folder, options=RUN | options)
    weights = {name: weight for name, weight in run.parameters() if name in names}
    found = {name: [weight.detach().clone()] for name, weight in weights.items()}

    def before_update() -> None:
        for name, weight in weights.items():
            rate = run.engine.optimizer.param_groups[0]["lr"]
            found[name].append((weight.main_grad.clone(), rate))

    run.engine._before_update = before_update
    run.steps(3)
    for name, weight in weights.items():
        found[name].append(weight.detach().clone())
    run.close()
    return found


@pytest.mark.parametrize("name", CASES)
def test_three_steps_by_hand(tmp_path, name):
    options, scale, weights = CASES[name]
    (found,) = run_distributed(1, _three_steps, tmp_path, options, list(weights))
    mu, nesterov = options.get("muon_momentum", 0.9), options.get("muon_nesterov", False)
    decay = options.get("weight_decay", 0.1)
    for weight, matrices in weights.items():
        before, *steps, after = found[weight]
        of_weight = [matrix.double() for matrix in matrices(before)]
        momenta = [torch.zeros_like(matrix) for matrix in of_weight]
        for gradient, rate in steps:
            for number, g in enumerate(matrices(gradient.double())):
                m = momenta[number] = mu * momenta[number] + (1 - mu) * g
                u = (1 - mu) * g + mu * m if nesterov else m
                of_weight[number] *= 1 - rate * decay
                of_weight[number] -= rate * by_hand(u, scale(*u.shape))
        assert steps[-1][1] > 0 and not torch.equal(before, after)
        for expected, matrix in zip(of_weight, matrices(after), strict=True):
            torch.testing.assert_close(matrix.double(), expected, rtol=1e-4, atol=1e-5)


def _of_systems(folder: Path) -> dict[str, list[str]]:
    """By system: the weights that Muon updates, after a step."""
    found = {}
    for name in SYSTEMS:
        run = TinyRun(Layout(), folder / name, options=MUON | systems.options(name))
        (result,) = run.steps(1)
        assert result[0] > 0 and result[1] > 0
        kinds = {
            id(weight): type(part.optimizer).__name__
            for part in optimizer_parts(run.engine.optimizer)
            for weight in part.get_parameters()
        }
        found[name] = [
            f"{parameter}: {kinds[id(weight)]}"
            for parameter, weight in run.parameters()
            if (kinds[id(weight)] == "StackedMuon")
            != (weight.ndim > 1 and "embedding" not in parameter)
        ]
        run.close()
    return found


def test_which_weights_of_each_system_are_muons(tmp_path):
    (found,) = run_distributed(1, _of_systems, tmp_path)
    assert found == dict.fromkeys(SYSTEMS, [])


def _train(layout: Layout, folder: Path, options: dict, resume: Path | None = None) -> list:
    """The losses of the steps from `resume` on, or of all, with a save in the middle."""
    run = TinyRun(layout, folder, options=MUON | options)
    if resume is not None:
        run.load(resume)
    found = []
    while run.iteration < STEPS:
        found += [loss for loss, _ in run.steps(1)]
        if run.iteration == HALF and resume is None:
            run.save()
    run.close()
    return found


#: Where etp divides the gathered W_down, it divides rows; elsewhere columns.
LAYOUTS = {
    "ep2": Layout(2, ep=2),
    "tp2, etp2": Layout(2, tp=2, etp=2),
    "etp2": Layout(2, etp=2),
    "pp2": Layout(2, pp=2),
}


@pytest.mark.parametrize("name", rest_in_full(LAYOUTS, "tp2, etp2"))
def test_losses_do_not_depend_on_the_layout(tmp_path, name):
    """And a checkpoint continues in another layout."""
    (one,) = run_distributed(1, _train, Layout(), tmp_path / "one", GATHERED)
    for losses in run_distributed(2, _train, LAYOUTS[name], tmp_path / "two", GATHERED):
        assert losses == pytest.approx(one, rel=1e-5)
    (resumed,) = run_distributed(1, _train, Layout(), tmp_path / "a", GATHERED, tmp_path / "two")
    assert resumed == pytest.approx(one[HALF:], rel=1e-5)
    for losses in run_distributed(
        2, _train, LAYOUTS[name], tmp_path / "b", GATHERED, tmp_path / "one"
    ):
        assert losses == pytest.approx(one[HALF:], rel=1e-5)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_resumed_run_has_the_same_bits(tmp_path, bf16):
    options, layout = AOE | {"bf16": bf16, "muon_fp32_matmul_prec": "medium"}, Layout(2, ep=2)
    straight = run_distributed(2, _train, layout, tmp_path / "run", options)
    resumed = run_distributed(2, _train, layout, tmp_path / "again", options, tmp_path / "run")
    assert [losses[HALF:] for losses in straight] == resumed


def _from_adam(folder: Path) -> str:
    run = TinyRun(Layout(), folder, options={"optimizer": "adam"})
    run.steps(1)
    run.save()
    run.close()
    with pytest.raises(InputError) as error:
        _train(Layout(), folder / "muon", {}, resume=folder)
    return str(error.value)


def test_adams_state_is_not_muons(tmp_path):
    (error,) = run_distributed(1, _from_adam, tmp_path)
    assert "the model has optimizer.state.momentum_buffer." in error and "\n" not in error


def _momenta(run: TinyRun) -> dict[str, torch.Tensor]:
    states = [part.optimizer.state for part in optimizer_parts(run.engine.optimizer)]
    return {
        name: state[weight]["momentum_buffer"].clone()
        for name, weight in run.parameters()
        for state in states
        if "momentum_buffer" in state.get(weight, {})
    }


def _upcycled(folder: Path) -> tuple[dict, dict]:
    """The momenta of a dense run, and those of the experts that start from it."""
    found = []
    for options in ({"num_experts": None, "moe_layer_freq": "1"}, {}):
        run = TinyRun(Layout(), folder, options=MUON | options)
        if options:
            run.steps(2)
            path = run.save()
        else:
            sizes = Expected({"hidden_size": TINY["hidden_size"]})
            engine = run.engine
            run.checkpointer.load(
                path, engine.chunks, engine.optimizer, engine.scheduler, dense=sizes
            )
        found.append(_momenta(run))
        run.close()
    return found[0], found[1]


def test_experts_start_with_the_momentum_of_a_dense_layer(tmp_path):
    ((dense, experts),) = run_distributed(1, _upcycled, tmp_path)
    layer = "decoder.layers.2.mlp"
    of_gate_up, of_out = (dense[f"{layer}.linear_fc{number}.weight"] for number in (1, 2))
    assert of_out.any() and of_gate_up.any()
    for expert in experts[f"{layer}.experts.w_out_LFD"]:
        assert torch.equal(expert, of_out.T)
    for expert in experts[f"{layer}.experts.w_gate_up_LD2F"]:
        assert torch.equal(expert.flatten(1), of_gate_up.T)
    assert not experts[f"{layer}.w_router_ED"].any()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_layer_wise_distributed_optimizer": True}, "^--use-distributed-optimizer with --opt"),
        ({"muon_tp_mode": "distributed"}, "^--muon-tp-mode is distributed, .* choose duplicated"),
    ],
)
def test_megatron_lm_hears_in_one_line_what_stacks_do_not_support(given, message):
    from moe_parallel.platform.muon import _arguments

    config = OptimizerConfig(optimizer="muon", **given)
    with pytest.raises(InputError, match=message):
        _arguments(config, [], None)
