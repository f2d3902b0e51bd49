"""The peers on GPUs, with replacements for their packages. These take arguments and weights as the
packages document them. The values and gradients must equal those of our own operators.
"""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter, functional

from moe_parallel.ops import select_backend
from tools.bench.contender import Bench
from tools.bench.inputs import Draw
from tools.bench.peers import gpu_packages, transformer_engine
from tools.bench.rows import BENCHES
from tools.bench.same_results import disagreement
from tools.bench.sizes import BenchSize

SIZE = BenchSize(T=12, d=8, n=4, K=2, f=6)


def routed(
    x_TD: Tensor, probs_TK: Tensor, experts_TK: Tensor, w_gate: Tensor, w_up: Tensor, w_out: Tensor
) -> Tensor:
    """Computes token by token; matrices are [E, F, D], [E, F, D] and [E, F, D]."""
    rows = []
    for x_D, probs_K, experts_K in zip(x_TD, probs_TK, experts_TK.tolist(), strict=True):
        rows.append(sum(
            gate * ((functional.silu(w_gate[e] @ x_D) * (w_up[e] @ x_D)) @ w_out[e])
            for gate, e in zip(probs_K, experts_K, strict=True)
        ))  # fmt: skip
    return torch.stack(rows)


class ScatterMoeMlp(torch.nn.Module):
    """GLUMLP: both weights [E, out, in]; the second half of the first is the activated one."""

    def __init__(self, width: int, expert_width: int, experts: int, k: int, activation: Any):
        super().__init__()
        self.experts = SimpleNamespace(weight=torch.empty(experts, 2 * expert_width, width))
        self.output_experts = SimpleNamespace(weight=torch.empty(experts, width, expert_width))

    def forward(self, x: Tensor, probs: Tensor, experts: Tensor) -> Tensor:
        up, gate = self.experts.weight.chunk(2, dim=1)
        return routed(x, probs, experts, gate, up, self.output_experts.weight.transpose(1, 2))


class MegaBlocksMlp:
    """ParallelDroplessMLP with grouped GLU: w1, v1 and w2 are each [E * F, D]; w1 is activated."""

    def __init__(self, arguments: SimpleNamespace) -> None:
        experts, width = arguments.moe_num_experts, arguments.hidden_size
        shape = (experts * arguments.ffn_hidden_size, width)
        self.experts = experts
        self.mlp = SimpleNamespace(
            w1=Parameter(torch.empty(shape)),
            v1=Parameter(torch.empty(shape)),
            w2=Parameter(torch.empty(shape)),
        )

    def forward_once(self, x: Tensor, probs: Tensor, experts: Tensor) -> tuple[Tensor, None]:
        weights = (self.mlp.w1, self.mlp.v1, self.mlp.w2)
        return routed(
            x, probs, experts, *(w.unflatten(0, (self.experts, -1)) for w in weights)
        ), None


def sonic(
    x: Tensor, scores: Tensor, tokens: Tensor, experts: Tensor, w1: Tensor, b1: None, w2: Tensor,
    b2: None, count: int, stream: int, activation: str,
) -> tuple[Tensor, None]:  # fmt: skip
    """w1 is [2F, D, E] with rows gate, up, gate, up, ...; w2 is [D, F, E]; tokens ascend."""
    assert (tokens.dtype, experts.dtype) == (torch.int32, torch.int32)
    assert bool((tokens.diff() >= 0).all())
    k = tokens.numel() // x.size(0)
    w1, w_out = w1.permute(2, 0, 1), w2.permute(2, 1, 0)
    shaped = (scores.view(-1, k), experts.view(-1, k))
    return routed(x, *shaped, w1[:, 0::2], w1[:, 1::2], w_out), None


def _sorted_choices(experts_TK: Tensor) -> Tensor:
    return experts_TK.flatten().argsort(stable=True)


class TransformerEngine(ModuleType):
    @staticmethod
    def moe_permute(x: Tensor, choices: Tensor, rows: int, map_type: str) -> tuple[Tensor, Tensor]:
        assert (choices.dtype, map_type) == (torch.int32, "index")
        order = _sorted_choices(choices)
        assert order.numel() == rows
        return x[order // choices.size(1)], order

    @staticmethod
    def moe_unpermute(y: Tensor, row_map: Tensor, probs: Tensor, map_type: str) -> Tensor:
        assert map_type == "index"
        scattered = torch.zeros_like(y).index_copy(0, row_map, y)
        return (scattered.unflatten(0, probs.shape) * probs.unsqueeze(-1)).sum(1)

    class GroupedLinear(torch.nn.Module):
        """A weight [out, in] for each group."""

        def __init__(self, groups: int, inner: int, columns: int, **options: Any) -> None:
            super().__init__()
            self.groups = groups
            for group in range(groups):
                setattr(self, f"weight{group}", Parameter(torch.empty(columns, inner)))

        def forward(self, x: Tensor, counts: list[int]) -> Tensor:
            weights = [getattr(self, f"weight{group}") for group in range(self.groups)]
            return torch.cat([g @ w.t() for g, w in zip(x.split(counts), weights, strict=True)])


def grouped_gemm(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    groups = zip(a.split(counts.tolist()), b, strict=True)
    return torch.cat([x @ w for x, w in groups])


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    modules = {
        "scattermoe": {},
        "scattermoe.mlp": {"GLUMLP": ScatterMoeMlp},
        "megablocks": {},
        "megablocks.layers": {},
        "megablocks.layers.arguments": {"Arguments": SimpleNamespace},
        "megablocks.layers.dmoe": {"ParallelDroplessMLP": MegaBlocksMlp},
        "sonicmoe": {
            "moe_general_routing_inputs": sonic,
            "enums": SimpleNamespace(ActivationType=SimpleNamespace(SWIGLU="swiglu")),
        },
        "grouped_gemm": {"ops": SimpleNamespace(gmm=grouped_gemm)},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    engine = TransformerEngine("transformer_engine.pytorch")
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    for peers in (gpu_packages, transformer_engine):
        monkeypatch.setattr(peers, "peer_package", lambda name, like: sys.modules[name])
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)


@pytest.mark.parametrize(
    ("op", "names"),
    [
        ("permute", [transformer_engine.PERMUTE]),
        ("unpermute", [transformer_engine.UNPERMUTE]),
        ("grouped_gemm", [transformer_engine.GROUPED_LINEAR, gpu_packages.GROUPED_GEMM]),
        (
            "routed_layer",
            [gpu_packages.MEGABLOCKS, gpu_packages.SCATTERMOE, gpu_packages.SONICMOE],
        ),
    ],
)
def test_they_compute_what_ours_compute(op: str, names: list[str]) -> None:
    bench: Bench = BENCHES[op](SIZE, Draw(torch.float32, "cpu"), select_backend("native"))
    expected = bench.ours[0].values()
    peers = {peer.name: peer for peer in bench.peers}
    for name in names:
        said = disagreement(peers[name].values(), expected, torch.float32)
        assert said is None, f"{name}: {said}"
