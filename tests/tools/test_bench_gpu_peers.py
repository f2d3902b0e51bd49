"""Transformer Engine as a peer, with a replacement for the package, which takes arguments and
weights as the package documents them. Values and gradients must equal those of our own operators.
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from moe_parallel.ops import select_backend
from tools.bench.inputs import Draw
from tools.bench.layers import BENCHES
from tools.bench.measurement import Bench, disagreement
from tools.bench.peers import transformer_engine
from tools.bench.sizes import BenchSize

SIZE = BenchSize(T=12, d=8, n=4, K=2, f=6)


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


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformerEngine("transformer_engine.pytorch")
    monkeypatch.setattr(transformer_engine, "peer_package", lambda name, like: engine)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("permute", transformer_engine.PERMUTE),
        ("unpermute", transformer_engine.UNPERMUTE),
        ("grouped_gemm", transformer_engine.GROUPED_LINEAR),
    ],
)
def test_it_computes_what_ours_computes(op: str, name: str) -> None:
    bench: Bench = BENCHES[op](SIZE, Draw(torch.float32, "cpu"), select_backend("native"))
    (peer,) = (peer for peer in bench.peers if peer.name == name)
    assert disagreement(peer.values(), bench.ours[0].values(), torch.float32) is None
