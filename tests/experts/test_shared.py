"""The shared expert: a SwiGLU layer for every token, split over tensor-parallel ranks."""

from typing import Any

import numpy
import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_parallel.config import make_config
from moe_parallel.experts.shared import OverlappedSharedExpert, SharedExpert
from moe_parallel.ops import select_backend
from moe_parallel.parallel import destroy_groups, initialize_groups
from tests.distributed import run_distributed
from tests.oracles import layers as oracle
from tests.oracles.routing import sigmoid

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


def expected(values: dict[str, numpy.ndarray], weighed: bool) -> numpy.ndarray:
    y = numpy.zeros((S, B, D))
    for place in numpy.ndindex(S, B):
        x = values["x"][place]
        weight = sigmoid(x @ values["w"]) if weighed else 1.0
        y[place] = weight * oracle.swiglu_expert(
            x, values["w_g"].T, values["w_p"].T, values["w_o"].T
        )
    return y


def _one_rank(tp: int, sequence_parallel: bool, weighed: bool, kind: type) -> dict[str, Any]:
    groups = initialize_groups(make_config({"tensor_model_parallel_size": tp}).parallel)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=D,
        num_attention_heads=2,
        ffn_hidden_size=3,  # for the model's dense layers: not the width here
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
    )
    expert = kind(config, WIDTH, weighed, groups, select_backend("reference"))
    values = {name: torch.from_numpy(value) for name, value in given().items()}
    rank = groups.tp.rank()

    def part(tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return tensor.chunk(tp, axis)[rank]

    with torch.no_grad():
        fc1 = torch.cat([part(values["w_g"], 0), part(values["w_p"], 0)])
        expert.dense.linear_fc1.weight.copy_(fc1)
        expert.dense.linear_fc2.weight.copy_(part(values["w_o"], 1))
        if weighed:
            expert.w_gate_1D.copy_(values["w"][None])
    x, direction = values["x"], values["direction"]
    if sequence_parallel:
        x, direction = part(x, 0), part(direction, 0)
    x = x.clone().requires_grad_()
    y = expert.finish(expert.begin(x))
    (y * direction).sum().backward()
    w_g, w_p = expert.dense.linear_fc1.weight.grad.chunk(2)
    found = {
        "y": y,
        "x": x.grad,
        "w_g": w_g,
        "w_p": w_p,
        "w_o": expert.dense.linear_fc2.weight.grad,
    }
    if weighed:
        found["w"] = expert.w_gate_1D.grad[0]
        found["marked"] = torch.tensor(expert.w_gate_1D.sequence_parallel)
    torch.distributed.barrier()
    destroy_groups()
    return {name: tensor.detach().numpy() for name, tensor in found.items()}


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize(
    "tp, sequence_parallel", [(1, False), (2, False), (2, True)], ids=["one", "tp2", "tp2, sp"]
)
def test_equals_the_transcription(tp, sequence_parallel, weighed):
    ranks = run_distributed(tp, _one_rank, tp, sequence_parallel, weighed, SharedExpert)
    values = given()
    wanted = oracle.numeric_gradient(
        lambda moved: float((expected(moved, weighed) * values["direction"]).sum()), values
    )
    wanted["y"] = expected(values, weighed)
    for name in ("y", "x"):
        if sequence_parallel:
            _close(numpy.concatenate([rank[name] for rank in ranks]), wanted[name], name)
        else:
            for rank in ranks:
                _close(rank[name], wanted[name], name)
    for name, axis in (("w_g", 0), ("w_p", 0), ("w_o", 1)):
        _close(numpy.concatenate([rank[name] for rank in ranks], axis), wanted[name], name)
    if weighed and sequence_parallel:  # Megatron-Core sums marked gradients at the end of the step
        assert all(rank["marked"] for rank in ranks)
        _close(sum(rank["w"] for rank in ranks), wanted["w"], "w")
    elif weighed:
        assert not any(rank["marked"] for rank in ranks)
        for rank in ranks:
            _close(rank["w"], wanted["w"], "w")


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


def _close(found: numpy.ndarray, wanted: numpy.ndarray, name: str) -> None:
    numpy.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=name)
