"""The loss of the head in chunks against its definition, also divided, and in whole models."""

from pathlib import Path

import numpy
import pytest
import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from moe_parallel.model.linear_cross_entropy import linear_cross_entropy
from moe_parallel.ops import select_backend
from tests.distributed import run_distributed
from tests.model.comparison import differences, make_start, run_all
from tests.model.test_layouts import LAYOUTS, ONE, model

T, D, V = 7, 5, 6
FACTOR = 0.25
OPS = select_backend("auto")


class Alone:
    """A group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """h, W, labels, weights; the last two tokens have the same label, and one has no weight."""
    generator = torch.Generator().manual_seed(0)
    h_TD = torch.randn(T, D, generator=generator, dtype=torch.float64)
    w_VD = torch.randn(V, D, generator=generator, dtype=torch.float64)
    labels_T = torch.tensor([0, 5, 3, 2, 1, 4, 4])
    weights_T = torch.tensor([1.0, 2.0, 0.0, 1.0, 0.5, 1.0, 3.0])
    return h_TD.to(dtype), w_VD.to(dtype), labels_T, weights_T


def by_definition() -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """The losses, and the gradients of FACTOR * (weights * losses).sum(), in fp64."""
    h, w, labels, weights = (each.numpy() for each in inputs())
    logits = h @ w.T
    probs = numpy.exp(logits) / numpy.exp(logits).sum(1, keepdims=True)
    losses = -numpy.log(probs[numpy.arange(T), labels])
    dlogits = FACTOR * weights[:, None] * (probs - numpy.eye(V)[labels])
    return losses, dlogits @ w, dlogits.T @ h


def results(
    rank: int,
    ranks: int,
    group: object,
    chunk: int = 3,
    dtype: torch.dtype = torch.float32,
    *,
    padded: bool = False,
) -> list:
    """The losses and gradients of a rank. `padded`: W has V more rows, whose logits are large."""
    h_TD, w_VD, labels_T, weights_T = inputs(dtype)
    whole_VD = torch.cat([w_VD, 9 * w_VD]) if padded else w_VD
    mine_VD = whole_VD.chunk(ranks)[rank].clone().requires_grad_()
    h_TD.requires_grad_()
    size = [V] * padded
    losses_T = linear_cross_entropy(h_TD, mine_VD, labels_T, weights_T, group, chunk, OPS, *size)
    assert losses_T.dtype == torch.float32
    (FACTOR * (losses_T * weights_T).sum()).backward()
    assert h_TD.grad is not None and mine_VD.grad is not None
    return [each.detach().double().numpy() for each in (losses_T, h_TD.grad, mine_VD.grad)]


@pytest.mark.parametrize("chunk", [1, 3, T, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_equals_the_definition(chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    found = results(0, 1, Alone(), chunk, dtype)
    for each, expected in zip(found, by_definition(), strict=True):
        numpy.testing.assert_allclose(each, expected, rtol=tolerance, atol=tolerance)


def _half(padded: bool) -> list:
    return results(dist.get_rank(), 2, dist.group.WORLD, padded=padded)


def test_a_divided_vocabulary() -> None:
    losses, dh, dw = by_definition()
    first, second = run_distributed(2, _half, False)
    for each in (first, second):
        numpy.testing.assert_allclose(each[0], losses, rtol=1e-5)
    numpy.testing.assert_allclose(first[1] + second[1], dh, rtol=1e-5, atol=1e-6)
    numpy.testing.assert_allclose(numpy.concatenate([first[2], second[2]]), dw, atol=1e-6)


def test_padding_has_no_probability() -> None:
    """On one rank; and on two, of which the second has nothing but padding."""
    losses, dh, dw = by_definition()
    parts = [[results(0, 1, Alone(), padded=True)], run_distributed(2, _half, True)]
    for ranks in parts:
        for each in ranks:
            numpy.testing.assert_allclose(each[0], losses, rtol=1e-5)
        numpy.testing.assert_allclose(sum(each[1] for each in ranks), dh, rtol=1e-5, atol=1e-6)
        found = numpy.concatenate([each[2] for each in ranks])
        numpy.testing.assert_allclose(found[:V], dw, atol=1e-6)
        assert abs(found[V:]).max() < 1e-30


def test_without_tokens_the_gradients_are_zero() -> None:
    h_TD = torch.empty(0, D, requires_grad=True)
    w_VD = torch.full((V, D), 2.0, requires_grad=True)
    no_labels, no_weights = torch.empty(0, dtype=torch.int64), torch.empty(0)
    torch.use_deterministic_algorithms(True)  # new tensors hold NaN
    try:
        losses_T = linear_cross_entropy(h_TD, w_VD, no_labels, no_weights, Alone(), 4, OPS)
        losses_T.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses_T.shape == (0,)
    assert w_VD.grad is not None
    assert torch.equal(w_VD.grad, torch.zeros(V, D))


def gradient_of_w(dtype: torch.dtype, main_VD: torch.Tensor | None = None) -> torch.Tensor | None:
    h_TD, w_VD, labels_T, weights_T = inputs(dtype)
    w_VD.requires_grad_()
    losses_T = linear_cross_entropy(
        h_TD, w_VD, labels_T, weights_T, Alone(), 3, OPS, main_gradient_VD=main_VD
    )
    (FACTOR * (losses_T * weights_T).sum()).backward()
    return w_VD.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_w_is_added_to_a_main_gradient_without_rounding(dtype) -> None:
    rounded_VD = gradient_of_w(dtype)
    main_VD = torch.zeros(V, D)
    assert gradient_of_w(dtype, main_VD) is None
    once_VD = main_VD.clone()
    assert torch.equal(once_VD.to(dtype), rounded_VD)
    assert torch.equal(once_VD, rounded_VD.float()) == (dtype == torch.float32)
    gradient_of_w(dtype, main_VD)
    assert torch.allclose(main_VD, 2 * once_VD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_main", [False, True])
def test_the_backward_pass_allocates_no_second_sum_of_the_gradient_of_w(dtype, has_main) -> None:
    width, vocabulary = 64, 512
    h_TD = torch.randn(3, width, dtype=dtype)
    w_VD = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    main_VD = torch.zeros(vocabulary, width) if has_main else None
    losses_T = linear_cross_entropy(
        h_TD, w_VD, torch.arange(3), torch.ones(3), Alone(), 3, OPS, main_gradient_VD=main_VD
    )
    loss = losses_T.sum()
    with torch.profiler.profile(profile_memory=True) as profiled:
        loss.backward()
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profiled.events())
    of_w = 0 if has_main or dtype == torch.float32 else w_VD.nbytes
    assert of_w <= allocated < of_w + vocabulary * width  # bytes; the rest is of tokens


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return result


def test_no_tensor_has_the_logits_of_all_tokens() -> None:
    tokens, width, vocabulary, chunk = 64, 4, 100, 16
    h_TD = torch.randn(tokens, width, requires_grad=True)
    w_VD = torch.randn(vocabulary, width, requires_grad=True)
    labels_T = torch.arange(tokens)
    with Largest() as largest:
        losses_T = linear_cross_entropy(
            h_TD, w_VD, labels_T, torch.ones(tokens), Alone(), chunk, OPS
        )
        losses_T.sum().backward()
    assert largest.elements == chunk * vocabulary


@pytest.mark.full
@pytest.mark.parametrize("system", ["topk, one expert", "lory"])
def test_models_train_as_with_megatrons_loss(tmp_path: Path, system: str) -> None:
    """The head of one has its own weights, that of the other is the embedding."""
    options = model(system)
    begun = make_start(options | {"loss_chunk_size": 0} | ONE, tmp_path)
    chunked = options | {"loss_chunk_size": 5}
    assert differences(run_all(1, begun, {"one": chunked | ONE}), begun.on_one_rank) == {}
    names = ("tp2", "tp2, sp", "pp2, virtual, recompute")
    cases = {name: chunked | LAYOUTS[2][name] for name in names}
    cases |= {"tp2, all at once": options | {"loss_chunk_size": 0} | LAYOUTS[2]["tp2"]}
    assert differences(run_all(2, begun, cases), begun.on_one_rank) == {}
