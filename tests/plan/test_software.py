"""What other software does differently from this program, by hand."""

import itertools
from dataclasses import replace
from statistics import mean

import pytest

from moe_parallel.plan.cluster import NODES, Cluster, Efficiency
from moe_parallel.plan.layout import Layout
from moe_parallel.plan.messages import messages_of_layer, messages_of_stage
from moe_parallel.plan.shape import Latent, PlannedExperts, Shape, swiglu_weights
from moe_parallel.plan.software import Software, exposed_dispatch, taken_places
from moe_parallel.plan.step_time import step_time, work_of_stage
from moe_parallel.plan.weights import weights_of_chunk
from moe_parallel.plan.work import is_repeated, work_of_layer

D, S = 1024, 512
EXPERTS = PlannedExperts(16, 4, 256, swiglu_weights(D, 16, 256))
SHAPE = Shape((True,) * 4, D, 8, 8, 128, 4096, 32000, False, S, bf16=True, experts=EXPERTS)
LAYOUT = Layout(ranks=16, ep=16, micro_batch=1, global_batch=64)
LATENT = Latent(queries=96, keys=64, plain=32, turned=16, values=24)


def test_places_are_those_of_all_choices() -> None:
    """Of 6 experts, two on each of three places, every choice of 3."""
    taken = [len({e // 2 for e in chosen}) for chosen in itertools.combinations(range(6), 3)]
    assert taken_places(6, 3, 3) == pytest.approx(mean(taken))
    assert taken_places(8, 8, 4) == 4
    assert taken_places(8, 1, 4) == 1


def test_a_row_crosses_once_for_each_node() -> None:
    """16 experts, one on each of 16 ranks, on 2 nodes: 4 choices are on 4 ranks."""
    software = Software(once_per_node=True)
    (x,) = [m for m in messages_of_layer(SHAPE, LAYOUT, True) if m.name == "dispatch: y"]
    wire, plain = software.wire(x, SHAPE, LAYOUT, 8), x.wire(8)
    row = D * 2
    assert plain.network == pytest.approx(S * 4 * 8 / 16 * row)
    assert wire.network == pytest.approx(S * taken_places(16, 4, 2) / 2 * row)
    assert wire.node == pytest.approx(S * 4 * row * 7 / 8)
    limited = replace(software, most_nodes=1).wire(x, SHAPE, LAYOUT, 8)
    assert limited.network == pytest.approx(S / 2 * row)
    assert Software().wire(x, SHAPE, LAYOUT, 8) == plain


def test_dispatch_beside_products() -> None:
    """All but the first pp - 1 of 8 micro-batches, with 20 of 132 multiprocessors."""
    layout = Layout(ranks=8, pp=2, global_batch=32)
    assert layout.micro_batches == 8
    assert exposed_dispatch(8.0, 100.0, layout, hides=False) == 8
    assert exposed_dispatch(8.0, 100.0, layout, hides=True) == pytest.approx(1 + 7 * 20 / 132)
    assert exposed_dispatch(80.0, 8.0, layout, hides=True) == pytest.approx(10 + 70 - 7)
    virtual = replace(layout, virtual=2)  # 2 (pp - 1) + (2 - 1) pp of 16 passes
    assert exposed_dispatch(16.0, 1e3, virtual, hides=True) == pytest.approx(4 + 12 * 20 / 132)


def test_a_step_that_hides_dispatch_is_shorter() -> None:
    cluster = Cluster(NODES["h100x8"], 2, Efficiency())
    shown = step_time(SHAPE, LAYOUT, cluster)
    hidden = step_time(SHAPE, LAYOUT, cluster, Software(hides_dispatch=True))
    assert hidden.parts["dispatch"] < shown.parts["dispatch"]
    assert hidden.parts["experts"] == shown.parts["experts"]


def test_biases_of_experts_are_traffic() -> None:
    (work,) = Software(expert_biases=True).work_of_layer(SHAPE, LAYOUT, True)
    assert (work.nbytes, work.backward_bytes) == (28 * S * 4 * D, 40 * S * 4 * D)
    assert Software(expert_biases=True).work_of_layer(SHAPE, LAYOUT, False) == []
    assert Software().work_of_layer(SHAPE, LAYOUT, True) == []


def test_the_products_of_latent_attention() -> None:
    """Of 8 heads, on 2 ranks: queries and keys of 32 + 16, values of 24."""
    shape, layout = replace(SHAPE, latent=LATENT), Layout(ranks=2, tp=2, sequence_parallel=True)
    work = {each.name: each for each in work_of_layer(shape, layout, True)}
    assert work["linear_q_down"].flops == 2 * S / 2 * D * 96
    assert work["linear_kv_down"].flops == 2 * S / 2 * D * (64 + 16)
    assert work["linear_q_up"].flops == 2 * S * 96 * 4 * 48
    assert work["linear_kv_up"].flops == 2 * S * 64 * 4 * (32 + 24)
    assert work["linear_proj"].flops == 2 * S * 4 * 24 * D
    # Half of S x S: q k of 48 and p v of 24 forward; q k, dq, dk of 48 and dp, dv of 24 backward.
    assert work["attention"].flops == 2 * 4 * (S * S / 2) * (48 + 24)
    assert work["attention"].backward_flops == 2 * 4 * (S * S / 2) * (3 * 48 + 2 * 24)
    again = {
        name
        for name, each in work.items()
        if is_repeated(each, replace(layout, recompute_modules=("mla_up_proj", "moe_act")))
    }
    assert again == {"linear_q_up", "linear_kv_up", "SwiGLU"}


def test_latent_attention_gathers_what_is_between_its_products() -> None:
    shape, layout = replace(SHAPE, latent=LATENT), Layout(ranks=2, tp=2, sequence_parallel=True)
    sizes = {m.name: m.size for m in messages_of_layer(shape, layout, True)}
    assert sizes["attention: x"] == S // 2 * (96 + 64 + 16) * 2
    assert sizes["attention: dx"] == S * (96 + 64 + 16) * 2
    assert sizes["attention: y"] == S * D * 2


def test_layers_that_predict_a_further_token() -> None:
    """One more layer, head, and product of both inputs on the last stage."""
    layout = Layout(ranks=2, pp=2, global_batch=4)
    further = replace(SHAPE, further=1)

    def numbers(shape: Shape, stage: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for work in work_of_stage(shape, layout, stage):
            found[work.name] = found.get(work.name, 0) + work.flops
        return found

    assert numbers(further, 0) == numbers(SHAPE, 0)
    before, after = numbers(SHAPE, 1), numbers(further, 1)
    assert after["logits"] == 2 * before["logits"]
    assert after["h W_out"] == pytest.approx(before["h W_out"] * 3 / 2)
    assert after["further_proj"] == 2 * S * 2 * D * D
    one, more = (
        sum(weight.size for weight in weights_of_chunk(shape, layout, 1, 0))
        for shape in (SHAPE, further)
    )
    layer = 4 * D * D + 2 * D + 16 * D + 16 * 3 * 256 * D
    assert more - one == layer + 2 * D * D + 3 * D
    assert len(messages_of_stage(further, layout, 1)) == len(messages_of_stage(SHAPE, layout, 1))


def test_chunks_of_unequal_layers() -> None:
    layout = Layout(ranks=2, pp=2, virtual=2, layers_of_chunks=(1, 2, 1, 0))
    chunks = {(s, c): layout.chunk_layers(4, s, c) for s in (0, 1) for c in (0, 1)}
    assert chunks == {
        (0, 0): range(1),
        (1, 0): range(1, 3),
        (0, 1): range(3, 4),
        (1, 1): range(4, 4),
    }
    assert layout.unlike_stages(SHAPE.moe_layers) == range(2)


def test_calls_of_experts_that_are_launched_one_by_one() -> None:
    """16 experts on 2 ranks: 8 on each, 6 products and 4 roundings each; two linear layers."""
    layout = replace(LAYOUT, ranks=2, ep=2)
    plain = Software().calls_of_layer(SHAPE, layout, True)
    each = Software(expert_by_expert=True)
    assert each.calls_of_layer(SHAPE, layout, True) == plain + 8 * 6
    mxfp8 = replace(each, rounding_calls=1)
    assert mxfp8.calls_of_layer(SHAPE, layout, True) == plain + 8 * (6 + 4) + 4
    scaled = replace(each, rounding_calls=4)
    assert scaled.calls_of_layer(SHAPE, layout, True) == plain + 8 * (6 + 16) + 16
    biased = replace(each, expert_biases=True)
    assert biased.calls_of_layer(SHAPE, layout, True) == plain + 8 * (6 + 8)
    dense = Software(rounding_calls=1).calls_of_layer(SHAPE, layout, False)
    assert dense == Software().calls_of_layer(SHAPE, layout, False) + 8


def test_graphs_need_no_calls_and_have_the_same_kernels() -> None:
    eager = Software(expert_by_expert=True, rounding_calls=1)

    def calls(*graphs: str, is_moe: bool = True) -> int:
        software = replace(eager, graphs=graphs)
        kernels = eager.kernels_of_layer(SHAPE, LAYOUT, is_moe)
        assert software.kernels_of_layer(SHAPE, LAYOUT, is_moe) == kernels
        return software.calls_of_layer(SHAPE, LAYOUT, is_moe)

    assert calls("layer") == calls("layer", is_moe=False) == 0
    assert calls() - calls("attention") == 6 + 12 + 4
    assert calls() - calls("router") == 33 + 15
    assert calls(is_moe=False) == calls("router", is_moe=False)


def test_kernels_take_their_time_beside_the_host() -> None:
    """A step takes the calls of the host, or the GPU with what each kernel takes besides."""
    software = Software(expert_by_expert=True)
    kernels = 4 * LAYOUT.micro_batches * software.kernels_of_layer(SHAPE, LAYOUT, True)

    def parts(call_time: float, kernel_time: float) -> dict[str, float]:
        node = replace(NODES["h100x8"], call_time=call_time, kernel_time=kernel_time)
        return step_time(SHAPE, LAYOUT, Cluster(node, 2, Efficiency()), software).parts

    gpu, slow = parts(0, 0), parts(0, 1e-3)
    assert "host" not in gpu and "kernels" not in gpu
    assert slow["kernels"] == pytest.approx(kernels * 1e-3)
    assert "host" not in slow
    head = gpu["output layer"] + gpu["optimizer"]
    both = parts(2e-3, 1e-3)
    layers = sum(both.values()) - head - gpu.get("gradients", 0) - gpu.get("weights", 0)
    assert layers == pytest.approx(kernels * 2e-3, rel=1e-6)


def test_tensor_parallel_messages_beside_products() -> None:
    """What is gathered is hidden; a quarter of what is reduced on 4 ranks is not."""
    layout = Layout(ranks=8, tp=4, sequence_parallel=True)
    messages = {m.name: m for m in messages_of_layer(SHAPE, layout, True)}
    hides = Software(hides_tensor=True)
    gathered, reduced = messages["attention: x"], messages["attention: y"]
    assert (gathered.kind, reduced.kind) == ("all-gather", "reduce-scatter")
    assert hides.wire(gathered, SHAPE, layout, 8).node == 0
    whole = reduced.wire(8).node
    assert hides.wire(reduced, SHAPE, layout, 8).node == pytest.approx(whole / 4)
