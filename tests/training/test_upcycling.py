"""Upcycling a dense checkpoint: weights and moments to the bit, in every layout and run."""

import numpy
import pytest
import torch
from megatron.core.utils import unwrap_model

from moe_parallel.config import make_config
from moe_parallel.model.upcycling import change_by_upcycling
from moe_parallel.training.checkpoint.record import Expected
from tests.distributed import run_distributed
from tests.training.tiny_run import AOE, TINY, Layout, TinyRun
from tests.training.whole_state import assemble, held

DENSE = {"num_experts": None, "moe_layer_freq": "1"}
D, F, E, MOE_LAYERS = TINY["hidden_size"], TINY["ffn_hidden_size"], 4, (1, 2, 3)
SIZES = Expected({"hidden_size": D})

SOURCES = {
    "tp2": Layout(2, tp=2),
    "pp2-vpp2": Layout(2, pp=2, vpp=2),
    "dp2-distributed": Layout(2, distributed=True),
}
TARGETS = {
    "ep2": Layout(2, ep=2),
    "ep2-distributed": Layout(2, ep=2, distributed=True),
    "dp2-distributed": Layout(2, distributed=True),
    "etp2": Layout(2, etp=2),
    "tp2-ep2": Layout(2, tp=2, ep=2),
    "tp2-no-sp": Layout(2, tp=2, sp=False),
    "tp2-etp2": Layout(2, tp=2, etp=2),
    "pp2": Layout(2, pp=2),
}
#: Instead of every target from every source, each source once.
FEW = {
    "lory": ("dp2-distributed", "tp2-etp2", "pp2"),
    "factorized": ("ep2", "etp2", "ep2-distributed"),
}
SYSTEMS = {
    "topk": {},
    "aoe": AOE,
    "factorized": {"moe_gate_low_rank_size": 8},
    "lory": {"expert_selection": "lory", "lory_segment_length": 4},
}
FACTORIZED = ("aoe", "factorized")
BF16 = {"bf16": True}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """{source: (its checkpoint, its whole tensors)}, and "bf16" from a run in bf16."""
    folder = tmp_path_factory.mktemp("dense")
    runs = {name: (layout, DENSE) for name, layout in SOURCES.items()}
    runs["bf16"] = (SOURCES["dp2-distributed"], DENSE | BF16)
    ranks = run_distributed(2, _train_each, runs, folder)
    return {
        name: (folder / name, assemble([rank[number] for rank in ranks]))
        for number, name in enumerate(runs)
    }


def _train_each(runs, folder):
    states = []
    for seed, (name, (layout, options)) in enumerate(runs.items()):
        # The weights differ between the sources, so that a mix-up shows.
        run = TinyRun(layout, folder / name, options=options | {"seed": seed})
        run.steps(3)
        run.save()
        states.append(held(run))
        run.close()
    return states


def _upcycle(run, path):
    engine = run.engine
    state = run.checkpointer.load(
        path, engine.chunks, engine.optimizer, engine.scheduler, dense=SIZES, seed=5
    )
    run.iteration = state.iteration
    return state


def _upcycle_each(jobs, folder):
    """(initial state, upcycled state, iteration, learning rate) of each (layout, options, path)."""
    results = []
    for layout, options, path in jobs:
        run = TinyRun(layout, folder, options=options)
        before = held(run)
        state = _upcycle(run, path)
        rate = run.engine.optimizer.param_groups[0]["lr"]
        results.append((before, held(run), state.iteration, rate))
        run.close()
    return results


def _layer(number, name):
    return f"decoder.layers.{number}.mlp.{name}"


def _w_out(number, system):
    return _layer(number, f"experts.w_out_{'LWD' if system in FACTORIZED else 'LFD'}")


def _assert_experts_are(found, source, initial, system, what):
    """Every part of `what` (weight, exp_avg, ...) of the experts equals the dense layer's."""
    for number in MOE_LAYERS:
        w_g, w_p = source[_layer(number, "linear_fc1.weight"), what]  # [2, F, D]
        w_o = source[_layer(number, "linear_fc2.weight"), what]

        def of_experts(name, number=number):
            return found[_layer(number, f"experts.{name}"), what]

        for expert in range(E):
            if system not in FACTORIZED:
                w_gate_up = of_experts("w_gate_up_LD2F")[expert]
                numpy.testing.assert_array_equal(w_gate_up[:, 0], w_g.T)
                numpy.testing.assert_array_equal(w_gate_up[:, 1], w_p.T)
            else:
                wide = of_experts("w_p_LDW")[expert]
                numpy.testing.assert_array_equal(wide[:, :F], w_p.T)
                random = initial.get((_layer(number, "experts.w_p_LDW"), what))
                random = 0 if random is None else random[expert][:, F:]
                numpy.testing.assert_array_equal(wide[:, F:], random)
                if what in ("exp_avg", "exp_avg_sq"):
                    assert not of_experts("w_up_LRW").any()
                    assert not found[_layer(number, "w_down_EDR"), what].any()
            w_out = found[_w_out(number, system), what][expert]
            numpy.testing.assert_array_equal(w_out[:F], w_o.T)
            assert not w_out[F:].any()


def _assert_rest_is(found, source, initial, system, what):
    """Attention, norms and the dense layer are the dense model's; routers are as initialized."""
    new = {_layer(number, "w_router_ED") for number in MOE_LAYERS if system != "aoe"}
    for name, kind in found:
        if kind == what and not any(_layer(number, "") in name for number in MOE_LAYERS):
            numpy.testing.assert_array_equal(found[name, what], source[name, what], err_msg=name)
    for name in new:
        if what in ("exp_avg", "exp_avg_sq"):
            assert not found[name, what].any()
        else:
            numpy.testing.assert_array_equal(found[name, what], initial[name, "weight"])


@pytest.mark.full
@pytest.mark.parametrize("system", SYSTEMS)
def test_experts_hold_the_dense_weights_and_moments_in_every_layout(tmp_path, dense, system):
    options = SYSTEMS[system]
    places = [(target, source) for source in SOURCES for target in TARGETS]
    if system in FEW:
        places = list(zip(FEW[system], SOURCES, strict=True))
    jobs = [(TARGETS[target], options, dense[source][0]) for target, source in places]
    ranks = run_distributed(2, _upcycle_each, jobs, tmp_path, timeout=300)
    factors = {}
    for number, (target, source) in enumerate(places):
        befores, afters, iterations, _ = zip(*(rank[number] for rank in ranks), strict=True)
        assert set(iterations) == {3}, target
        initial, found = assemble(befores), assemble(afters)
        for what in ("weight", "exp_avg", "exp_avg_sq"):
            _assert_experts_are(found, dense[source][1], initial, system, what)
            _assert_rest_is(found, dense[source][1], initial, system, what)
        if system == "aoe":
            for name in _layer(1, "w_down_EDR"), _layer(3, "experts.w_up_LRW"):
                weight = found[name, "weight"]
                numpy.testing.assert_array_equal(weight, factors.setdefault((source, name), weight))


@pytest.mark.full
@pytest.mark.parametrize("system", ["topk", "aoe"])
@pytest.mark.parametrize("source", ["bf16", "tp2"])
def test_bf16_takes_the_fp32_weights(tmp_path, dense, system, source):
    path, saved = dense[source]
    layouts = Layout(2, ep=2), Layout(2, ep=2, distributed=True)
    jobs = [(layout, SYSTEMS[system] | BF16, path) for layout in layouts]
    ranks = run_distributed(2, _upcycle_each, jobs, tmp_path)
    precise = {
        (name, "fp32_param"): saved.get((name, "fp32_param"), saved[name, "weight"])
        for name, _ in saved
    }
    for number in range(len(jobs)):
        befores, afters, _, _ = zip(*(rank[number] for rank in ranks), strict=True)
        initial, found = assemble(befores), assemble(afters)
        initial |= {(name, "fp32_param"): initial[name, "weight"] for name, _ in initial}
        for what in ("fp32_param", "exp_avg", "exp_avg_sq"):
            _assert_experts_are(found, precise | saved, initial, system, what)
            _assert_rest_is(found, precise | saved, initial, system, what)
        for name, _ in found:  # the computing weights are the updated weights, rounded once
            rounded = torch.from_numpy(found[name, "fp32_param"]).bfloat16().float().numpy()
            numpy.testing.assert_array_equal(found[name, "weight"], rounded, err_msg=name)


def _logits(run):
    """The logits of every sample of a batch, [B, S, V], from the whole model on one rank."""
    (model,) = unwrap_model(run.engine.chunks)
    model.eval()
    with torch.no_grad():
        logits = [model(b["tokens"], b["position_ids"], None) for b in run.batches()]
    model.train()
    return torch.cat(logits).double().numpy()


FULL_RANK = AOE | {"aoe_low_rank_size": D, "aoe_wide_size": F + 4}
#: Systems, by whether their model first computes the same as the dense model.
SAME = {
    "topk": {},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "large router": {"moe_router_hidden_size": 16},
    "shared expert": {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    "aoe": FULL_RANK,
    "aoe, K=1": FULL_RANK | {"moe_router_topk": 1},
    "lory": SYSTEMS["lory"],
    "lory_prefix": SYSTEMS["lory"] | {"expert_selection": "lory_prefix"},
    "smear": {"expert_selection": "smear"},
}
CHANGED = {
    "K=1": {"moe_router_topk": 1},
    "capacity": {"moe_expert_capacity_factor": 0.5},
    "aoe, probs over all": FULL_RANK | {"aoe_gate": "all"},
    "top_p": {"expert_selection": "top_p"},
    "expert_choice": {"expert_selection": "expert_choice"},
}
PARTING = ("topk", "aoe", "aoe, K=1")


def _compare_models(folder):
    """Logits and next loss of a dense run and of its upcycled models, by system."""
    run = TinyRun(Layout(), folder, options=DENSE)
    run.steps(12)
    path = run.save()
    dense = _logits(run), run.steps(1)[0][0]
    run.close()
    upcycled = {}
    for system, options in (SAME | CHANGED).items():
        run = TinyRun(Layout(), folder, options=options)
        _upcycle(run, path)
        logits = _logits(run)
        run.engine.statistics.training.clear()
        loss = run.steps(1)[0][0]
        layers = run.engine.statistics.training.summaries()
        if system in PARTING:
            run.steps(3)
        weights = {name: weight.detach().numpy() for name, weight in run.parameters()}
        upcycled[system] = logits, loss, layers, weights
        run.close()
    return dense, upcycled


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    (result,) = run_distributed(1, _compare_models, tmp_path_factory.mktemp("compared"))
    return result


def _announced(options):
    return change_by_upcycling(make_config(TINY | options))


@pytest.mark.parametrize("system", SAME)
def test_the_function_stays_the_same(compared, system):
    (logits, next_loss), upcycled = compared
    found, loss, *_ = upcycled[system]
    assert numpy.abs(logits).max() > 1
    numpy.testing.assert_allclose(found, logits, atol=1e-5 * numpy.abs(logits).max())
    assert loss == pytest.approx(next_loss, rel=1e-5)
    assert _announced(SAME[system]) is None


@pytest.mark.parametrize("system", CHANGED)
def test_where_it_changes_that_is_said(compared, system):
    (logits, _), upcycled = compared
    assert numpy.abs(upcycled[system][0] - logits).max() > 0.1
    assert _announced(CHANGED[system])


@pytest.mark.parametrize("system", PARTING)
def test_experts_part(compared, system):
    """From the first step tokens go to different experts, and so experts become different."""
    _, _, layers, weights = compared[1][system]
    for layer in layers:
        assert min(layer["tokens_per_expert"]) > 0, layer
    for number in MOE_LAYERS:
        w_out = weights[_w_out(number, system.split(",")[0])]
        for one in range(E):
            for other in range(one):
                assert numpy.abs(w_out[one, :F] - w_out[other, :F]).max() > 1e-4
