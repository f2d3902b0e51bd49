"""Plans equal what a rank holds, keeps and sends in a real step, to the byte.

The oracle builds the model with its optimizer, runs a step over gloo, and counts by means of its
own (tests/plan/counting.py). The plan is made in another process, with fake tensors.
"""

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_parallel.model.attention import _strip
from moe_parallel.parallel import destroy_groups
from moe_parallel.plan import measure
from moe_parallel.plan.layout import Group, layout_of
from moe_parallel.plan.measure import ATTENTION, FP32, _measured
from moe_parallel.plan.search import model_of
from moe_parallel.plan.stage import SMALL, memory_of_stage, messages_of_stage
from moe_parallel.training.optimizer import optimizer_parts
from tests.distributed import run_distributed
from tests.plan.counting import Kept, Messages
from tests.plan.running import (
    ALL_CHOSEN,
    AOE,
    AOE_EXPERT_CHOICE,
    AOE_THRESHOLD,
    AOE_TOP_P,
    CONSTANT,
    CORM,
    DENSE,
    ERC,
    EXPERT_CHOICE,
    FREE,
    GATED,
    HASH,
    LORY,
    LORY_PREFIX,
    RELU,
    ROUTING_FREE,
    SEGMENT_EXPERT_CHOICE,
    SMEAR,
    THRESHOLD,
    TOP_P,
    UOE,
    VOCABULARY,
    Options,
    batches,
    config_of,
    engine_of,
    factors_stay_bf16,
    mean_of,
    visits_of,
)
from tests.systems import MUON, needs_muon


class Counts(NamedTuple):
    """Of one rank, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    state: int
    kept: int  # the most at the end of a forward pass of a chunk
    sent: dict[tuple[str, tuple[int, ...]], int]  # in a step, by kind and ranks


def _storages(tensors: Any) -> int:
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())


def _real(cases: dict[str, Options]) -> dict[str, Counts]:
    return {name: _real_of(options) for name, options in cases.items()}


def _real_of(options: Options) -> Counts:
    config = config_of(options)
    engine = engine_of(config)
    dtype = torch.bfloat16 if config.training.bf16 else torch.float32
    # On a CPU the strips of queries of a share have a mask, which all layers have in common.
    others = [_strip(config.training.seq_length, dtype)]
    others += [t for c in engine.chunks for t in (*c.module.parameters(), *c.module.buffers())]
    kept, most = Kept(others), 0

    def note(*_: Any) -> None:
        nonlocal most
        most = max(most, kept.nbytes)

    for chunk in engine.chunks:
        chunk.register_forward_hook(note)
    hooks = pytest.MonkeyPatch()
    hooks.setattr("moe_parallel.layers.autonomous.saved_tensors_hooks", kept.within)
    with factors_stay_bf16(), kept.counting(), Messages() as messages:
        engine.step(batches(config))
    hooks.undo()
    sent: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for (kind, ranks, size), times in messages.counted.items():
        if len(ranks) > 1 and (size > SMALL or kind != "all-reduce"):
            sent[kind, ranks] += size * times
    counts = Counts(*_built(engine), most, dict(sent))
    destroy_groups()
    return counts


def _built(engine: Any) -> tuple[int, int, int, int]:
    """Bytes of weights, gradients, optimizer state and other state."""
    weights = [weight for chunk in engine.chunks for weight in chunk.parameters()]
    gradients = [
        buffer.grad_data
        for chunk in engine.chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    held = {w.untyped_storage().data_ptr() for w in weights}
    states = 0
    for part in optimizer_parts(engine.optimizer):
        for weight, state in part.optimizer.state.items():
            numbers = [t for name, t in state.items() if name != "step"]
            if weight.untyped_storage().data_ptr() not in held:
                numbers.append(weight)  # the fp32 copy of a bf16 weight
            states += sum(t.numel() * t.element_size() for t in numbers)
    buffers = [buffer for layer in engine._expert_layers for buffer in layer.buffers()]
    return _storages(weights), _storages(gradients), states, _storages(buffers)


def _planned(world: int, cases: dict[str, Options]) -> dict[str, list[Counts]]:
    """By case: for each rank."""
    dist.destroy_process_group()
    found = {name: [_plan_of(o, world, rank) for rank in range(world)] for name, o in cases.items()}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)  # for the end
    return found


def _plan_of(options: Options, world: int, rank: int) -> Counts:
    config = config_of(options)
    layout = layout_of(config, world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "mean_visits", lambda n, places, k: visits_of(config, places))
        model = model_of(config, VOCABULARY, world, mean_of(config))
    stage, in_stage = divmod(rank, layout.tp * layout.cp * layout.dp)
    memory = memory_of_stage(model, stage, in_stage // layout.tp)
    sent: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for each in messages_of_stage(model, stage):
        sent[each.kind, ranks_of(each.group, rank)] += each.size * each.times
    # Autograd keeps what is computed again only in the backward pass.
    again = [whole.layers[m].kept for whole in model.again for m in whole.layers]
    now = [0 if layout.recompute else part.kept for part in model.parts.layers.values()]
    peaks = [a - b for a, b in zip(again, now * len(model.again), strict=True)]
    kept = memory.activations - max(peaks, default=0)
    return Counts(
        memory.weights, memory.gradients, memory.optimizer, memory.state, kept, dict(sent)
    )


def ranks_of(group: Group, rank: int) -> tuple[int, ...]:
    first = rank - rank // group.stride % group.size * group.stride
    return tuple(range(first, first + group.size * group.stride, group.stride))


def check(world: int, cases: dict[str, Options], *, of_first_share: bool = False) -> None:
    """`of_first_share`: compare what is kept on the first context-parallel rank alone.

    The two chunks of the last one are neighbors: their attention is one, and keeps less.
    """
    (planned,) = run_distributed(1, _planned, world, cases)
    for rank, real in enumerate(run_distributed(world, _real, cases)):
        wrong = {
            name: {
                field: (plan, built)
                for field, plan, built in zip(
                    Counts._fields, planned[name][rank], real[name], strict=True
                )
                if plan != built
                and not (field == "kept" and of_first_share and _share_of(cases[name], rank))
            }
            for name in cases
        }
        wrong = {name: fields for name, fields in wrong.items() if fields}
        assert not wrong, (rank, wrong)


def _share_of(options: Options, rank: int) -> int:
    parallel = config_of(options).parallel
    return rank // parallel.tensor_model_parallel_size % parallel.context_parallel_size


BF16, SHARDED = {"bf16": True}, {"use_distributed_optimizer": True}
EP, TP = {"expert_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}
SP, PP = TP | {"sequence_parallel": True}, {"pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
ETP1 = {"expert_tensor_parallel_size": 1}
VIRTUAL = PP | {"num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1}
OVERLAP = SHARDED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}
AOE_ALL, GATHER = AOE | ALL_CHOSEN, {"aoe_gather_w_down": True}
ODD = {"hidden_size": 40, "ffn_hidden_size": 10, "moe_ffn_hidden_size": 18}  # padding everywhere
BIAS = {"moe_router_enable_expert_bias": True}

SYSTEMS = {
    "topk": {},
    "topk, sigmoid, bias by quantiles, importance": {"moe_router_score_function": "sigmoid"}
    | BIAS
    | {"moe_router_bias_update": "quantile", "moe_importance_loss_coeff": 0.1},
    "topk, large router, W_g of two factors, jitter": {"moe_router_hidden_size": 24}
    | {"moe_gate_low_rank_size": 16, "moe_input_jitter_eps": 0.1},
    "coupling loss": ERC,
    "shared": GATED,
    "free": FREE,
    "constant": CONSTANT,
    "top_p": TOP_P,
    "relu": RELU,
    "threshold": THRESHOLD,
    "expert_choice": EXPERT_CHOICE,
    "segment_expert_choice": SEGMENT_EXPERT_CHOICE,
    "aoe": AOE_ALL,
    "aoe, selected": AOE_ALL | {"aoe_gradient": "selected", "moe_aux_loss_coeff": 0.0},
    "aoe, C of all kept": AOE_ALL | {"aoe_recompute_scores": False},
    "aoe, free": AOE | FREE,
    "aoe_top_p": AOE_TOP_P,
    "aoe_threshold, by sign": AOE_THRESHOLD | {"moe_threshold_update": "sign"},
    "aoe_expert_choice": AOE_EXPERT_CHOICE,
    "routing_free": ROUTING_FREE,
    "uoe": UOE,
    "corm": CORM,
    "hash": HASH,
    "lory": LORY,
    "lory_prefix": LORY_PREFIX,
    "smear": SMEAR,
    "dense": DENSE,
    "dense and MoE layers": {"moe_layer_freq": "[0]+[1]"},
    "q and k norms, biases": {"qk_layernorm": True, "add_qkv_bias": True},
    "capacity, padded": {"moe_expert_capacity_factor": 1.0}
    | {"moe_pad_expert_input_to_capacity": True},
}
LAYOUTS = {
    "dp, buckets, odd sizes": ODD | BF16 | OVERLAP | {"ddp_bucket_size": 20_000},
    "ep": EP | BF16 | SHARDED,
    "aoe, ep, gathered, recomputed": AOE_ALL | EP | BF16 | GATHER | FULL,
    "sp": SP | BF16 | SHARDED,
    "aoe, tp": AOE_ALL | TP | BF16,
    "aoe, etp, gathered": AOE_ALL | SP | BF16 | GATHER | SHARDED,
    "sp and ep": SP | EP | ETP1 | BF16 | SHARDED,
    "aoe, cp and ep, attention recomputed": AOE_ALL | CP | EP | BF16 | SHARDED | SELECTIVE,
    "pp": PP | BF16 | SHARDED,
    "pp, untied": PP | {"untie_embeddings_and_output_weights": True},
    "pp, virtual": VIRTUAL | BF16 | SHARDED,
    "ep, in parts": EP | BF16 | {"moe_dispatch_parts": 2},
    "layers recomputed": BF16 | EP | SELECTIVE | {"recompute_modules": "moe layernorm"},
}
QUICK = ("aoe, ep, gathered, recomputed", "sp and ep", "pp, virtual")


def each(cases: dict[str, Options], more: Options) -> dict[str, Options]:
    return {name: more | options for name, options in cases.items()}


def test_some_systems_on_one_rank() -> None:
    few = ("topk", "aoe", "routing_free", "lory", "dense and MoE layers")
    check(1, each({name: SYSTEMS[name] for name in few}, BF16 | SHARDED))


def test_some_layouts_on_two_ranks() -> None:
    check(2, {name: LAYOUTS[name] for name in QUICK})


@needs_muon
def test_muon_has_one_moment_where_adam_has_two() -> None:
    check(
        2,
        {
            "aoe, ep, untied": AOE_ALL
            | EP
            | BF16
            | MUON
            | {"untie_embeddings_and_output_weights": True}
        },
    )


def _work(cases: dict[str, Options]) -> dict[str, dict[str, list[float]]]:
    """By case and kind: the FLOPs of each operator of a layer. Of "torch": its attention."""
    dist.destroy_process_group()
    found = {}
    for name, options in cases.items():
        patch = pytest.MonkeyPatch()
        if "torch" in name:
            patch.setattr("moe_parallel.model.attention_backends.serves", lambda *_: False)
        _measured.cache_clear()
        config = config_of(options)
        (part,) = model_of(config, VOCABULARY, 2, mean_of(config)).parts.layers.values()
        patch.undo()
        found[name] = {}
        for kind, flops, _ in part.forward + part.backward:
            found[name].setdefault(kind, []).append(flops)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)  # for the end
    return found


def test_attention_costs_the_same_on_every_host_and_in_every_share() -> None:
    """A plan is of GPUs, whatever kernels the CPU has on which it is made."""
    long = DENSE | BF16 | {"seq_length": 2048, "micro_batch_size": 1}
    cases = {"ours": long, "torch": long, "ours, cp": long | CP, "torch, cp": long | CP}
    (found,) = run_distributed(1, _work, cases)
    whole = sum(found["ours"][ATTENTION])
    for name, work in found.items():
        runs = 2 if "cp" in name else 1  # of neighboring tokens in a share
        assert sum(work[ATTENTION]) * runs == whole > 0, name
        assert len(work[ATTENTION]) == 2 * runs, name  # forward and backward, not in strips


def test_a_router_multiplies_in_fp32() -> None:
    (found,) = run_distributed(1, _work, {"topk": BF16})
    tokens, d, n, passes = 4 * 32, 64, 4, 3
    assert sum(found["topk"][FP32]) == passes * 2 * tokens * d * n


def test_a_system_that_nobody_declared() -> None:
    """All experts are taken, so that loads are balanced."""
    strange = {"expert_selection": "tests.plan.strange_system:strange", "moe_router_topk": 4}
    check(2, {name: strange | BF16 | SHARDED | o for name, o in {"sp": SP, "ep": EP}.items()})


@pytest.mark.full
@pytest.mark.parametrize("precision", [{}, BF16 | SHARDED], ids=["fp32", "bf16"])
def test_systems_on_one_rank(precision: Options) -> None:
    check(1, each(SYSTEMS, precision))


@pytest.mark.full
@pytest.mark.parametrize("layout", [EP, SP, TP], ids=["ep", "sp", "tp"])
def test_systems_on_two_ranks(layout: Options) -> None:
    # Experts that choose take other tokens on each rank.
    left_out = {name for name in SYSTEMS if "expert_choice" in name}
    if layout is EP:
        left_out |= {"lory", "lory_prefix", "smear", "dense"}
    cases = {name: o for name, o in SYSTEMS.items() if name not in left_out}
    check(2, each(cases, BF16 | SHARDED | layout))


@pytest.mark.full
def test_layouts_on_two_ranks() -> None:
    check(2, LAYOUTS, of_first_share=True)


@pytest.mark.full
def test_on_four_ranks() -> None:
    check(
        4,
        {
            "ep and edp": EP | BF16 | SHARDED,
            "tp and cp": SP | CP | EP | BF16 | SHARDED,
            "pp and ep": PP | EP | BF16 | OVERLAP,
            "tp, pp, aoe": SP | PP | AOE_ALL | BF16 | GATHER | SHARDED,
            "threshold, ep and etp": THRESHOLD | SP | EP | BF16,
            "coupling loss, ep and etp": ERC | SP | EP | BF16,
            "uoe, pp and ep": UOE | PP | EP | BF16 | OVERLAP,
            "lory, tp and cp": LORY | SP | CP | BF16 | SHARDED,
        },
        of_first_share=True,
    )
