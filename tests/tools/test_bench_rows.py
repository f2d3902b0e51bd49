"""Every benchmark at a tiny size: the contenders' values and gradients agree with ours, and each
omitted contender gives a reason. Nothing is timed."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moe_parallel.ops import Ops, select_backend
from tools.bench.inputs import LEAST_MARGIN, Draw
from tools.bench.layers import BENCHES
from tools.bench.measurement import Absent, Bench, BenchContender, disagreement
from tools.bench.peers import huggingface, megatron
from tools.bench.sizes import BenchSize

TINY = BenchSize(T=24, d=16, n=4, K=2)
SIZES = {
    "routing_map": TINY,
    "permute": TINY,
    "unpermute": TINY,
    "grouped_gemm": replace(TINY, f=24),
    "swiglu": replace(TINY, f=24),
    "norm_topk": replace(TINY, l=8),
    "expert_merge": BenchSize(T=3, d=16, n=4, f=24),
    "attention": BenchSize(T=40, d=32),
    "routed_layer": replace(TINY, f=24),
    "aoe_layer": replace(TINY, f=24, l=8),
}


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    with megatron.one_rank():
        yield


@pytest.fixture(scope="module", params=["reference", "native"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return select_backend(request.param)


def bench_of(op: str, ops: Ops, dtype: torch.dtype, size: BenchSize | None = None) -> Bench:
    return BENCHES[op](size or SIZES[op], Draw(dtype, "cpu"), ops)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", BENCHES)
def test_contenders_agree(op: str, dtype: torch.dtype, ops: Ops) -> None:
    bench = bench_of(op, ops, dtype)
    expected = bench.ours[0].values()
    peers = [peer for peer in bench.peers if isinstance(peer, BenchContender)]
    for contender in [*bench.ours[1:], *peers]:
        if contender.answer or contender.name.endswith(("deepgemm", "sonicmoe")):
            continue  # another model; kernels for GPUs, which report it when they run
        said = disagreement(contender.values(), expected, dtype)
        assert said is None, f"{contender.name}: {said}"


def test_the_peers_of_the_routed_layer() -> None:
    bench = bench_of("routed_layer", select_backend("native"), torch.float32)
    names = {peer.name for peer in bench.peers}
    assert {"list of experts", "torch grouped_mm", megatron.NAME} <= names
    assert {f"HF Mixtral {name}" for name in ("eager", "grouped_mm", "batched_mm")} <= names
    absent = {c.name: c.reason for c in bench.peers if isinstance(c, Absent)}
    assert (megatron.NAME in absent) is torch.cuda.is_available(), absent.get(megatron.NAME)


def test_a_peer_that_would_take_all_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 100_000

    monkeypatch.setattr(huggingface.psutil, "virtual_memory", Memory)
    bench = bench_of("routed_layer", select_backend("native"), torch.float32)
    (absent,) = [c for c in bench.peers if c.name == "HF Mixtral batched_mm"]
    assert "copies the weights for every row" in absent.reason


def test_tokens_stand_clear_of_near_ties() -> None:
    size, draw = SIZES["norm_topk"], Draw(torch.bfloat16, "cpu")
    w_EDR = draw.weight(size.n, size.d, size.l, seed=2)
    x_TD = draw.tokens_with_margin(size, w_EDR)
    norms_TE = torch.einsum("td,edr->ter", x_TD.double(), w_EDR.double()).norm(dim=-1)
    sorted_TE = norms_TE.sort(dim=-1, descending=True).values
    assert x_TD.shape == (size.T, size.d)
    assert bool((sorted_TE[:, 1] > sorted_TE[:, 2] * (1 + LEAST_MARGIN / 2)).all())
