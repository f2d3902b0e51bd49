"""The shared expert: a SwiGLU layer for every token, split over tensor-parallel ranks."""

import numpy
import pytest
import torch

from moe_parallel.experts.shared import OverlappedSharedExpert, SharedExpert

S, B, D, WIDTH = 4, 2, 6, 10


def given() -> dict[str, numpy.ndarray]:
    rng = numpy.random.default_rng(0)
    return {
        "x": rng.normal(size=(S, B, D)),
        "direction": rng.normal(size=(S, B, D)),
        "w_g": rng.normal(size=(WIDTH, D)),
        "w_p": rng.normal(size=(WIDTH, D)),
        "w_o": rng.normal(size=(D, WIDTH)),
        "w": rng.normal(size=D),
    }


@pytest.mark.gpu
def test_overlapped_it_computes_the_same():
    values = {name: torch.from_numpy(value).cuda() for name, value in given().items()}
    found = _on_gpu(SharedExpert, values), _on_gpu(OverlappedSharedExpert, values)
    for plain, overlapped in zip(*found, strict=True):
        torch.testing.assert_close(overlapped, plain, rtol=0, atol=0)


def _on_gpu(kind: type, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    expert = kind.__new__(kind)
    torch.nn.Module.__init__(expert)
    expert.w_gate_1D = None
    expert.recomputes = False
    expert.dense = _Dense(values)
    x = values["x"].clone().requires_grad_()
    begun = expert.begin(x)
    busy = torch.rand(2000, 2000, device="cuda")
    for _ in range(20):  # work between begin and finish
        busy = busy @ busy / 1000
    y = expert.finish(begun)
    (y * values["direction"]).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in expert.parameters())]


class _Dense(torch.nn.Module):
    """A plain SwiGLU layer: Megatron-Core's layer needs process groups."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name in ("w_g", "w_p", "w_o"):
            self.register_parameter(name, torch.nn.Parameter(values[name].clone()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (torch.nn.functional.silu(x @ self.w_g.T) * (x @ self.w_p.T)) @ self.w_o.T, None
