"""Core attention by torch's kernels against the definition in numpy, and in whole models."""

from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import sdpa_kernel

from moe_parallel.config import Config, make_config
from moe_parallel.model import attention_backends
from moe_parallel.model.attention import TorchAttention, _strip
from moe_parallel.model.attention_backends import CORE_ATTENTIONS
from moe_parallel.model.forward import run_micro_batches
from moe_parallel.ops import select_backend
from moe_parallel.parallel import destroy_groups
from moe_parallel.selection.tokens import take, zigzag
from tests.distributed import run_distributed
from tests.model.comparison import differences, make_start, run_all
from tests.model.small_gpt import DOCUMENTS as DOCUMENTS_OF_A_BATCH
from tests.model.small_gpt import SIZES, Options, build, micro_batches
from tests.model.test_layouts import LAYOUTS, ONE, model
from tests.tiers import rest_in_full

S, B, H, C = 9, 2, 4, 6
ON_CPU = ["auto", "flash", "unfused"]
KERNELS = [
    *(("cpu", backend) for backend in ON_CPU),
    *(pytest.param("cuda", each, marks=pytest.mark.gpu) for each in (*ON_CPU, "fused")),
]


#: The lengths of the documents in each of the B sequences.
DOCUMENTS = [[4, 5], [1, 6, 2]]


def by_definition(
    q: numpy.ndarray, k: numpy.ndarray, v: numpy.ndarray, documents: list[list[int]]
) -> numpy.ndarray:
    """One query at a time: [S, B, H, C], [S, B, G, C] twice -> [S, B, H * C]."""
    y = numpy.empty_like(q)
    for s, b, h in numpy.ndindex(q.shape[:3]):
        g = h // (q.shape[2] // k.shape[2])
        first = max(begin for begin in accumulate(documents[b][:-1], initial=0) if begin <= s)
        scores = k[first : s + 1, b, g] @ q[s, b, h] / numpy.sqrt(q.shape[3])
        weights = numpy.exp(scores - scores.max())
        y[s, b, h] = weights @ v[first : s + 1, b, g] / weights.sum()
    return y.reshape(*q.shape[:2], -1)


def attention(
    backend: str, groups: int, channels: int = C, dtype: torch.dtype = torch.float32
) -> TorchAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H * channels,
        num_attention_heads=H,
        num_query_groups=groups,
        params_dtype=dtype,
    )
    built = CORE_ATTENTIONS[backend](
        config, layer_number=1, attn_mask_type=None, attention_type="self"
    )
    assert isinstance(built, TorchAttention)
    return built


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "several"])
@pytest.mark.parametrize("groups", [H, 2, 1])
@pytest.mark.parametrize(("device", "backend"), KERNELS)
def test_equals_the_definition(
    device: str, backend: str, groups: int, documents: list[list[int]] | None
) -> None:
    assert_equals_the_definition(device, backend, groups, documents)


def assert_equals_the_definition(
    device: str, backend: str, groups: int, documents: list[list[int]] | None
) -> None:
    # On a GPU the fast kernels compute bf16 with heads of a multiple of 8 channels.
    channels, dtype = (8, torch.bfloat16) if device == "cuda" else (C, torch.float64)
    rng = numpy.random.default_rng(0)
    q, k, v = (rng.normal(size=(S, B, heads, channels)) for heads in (H, groups, groups))
    given = [torch.from_numpy(each).to(device, dtype) for each in (q, k, v)]
    lengths = torch.tensor(sum(documents, [])) if documents else None
    y = attention(backend, groups, channels, dtype)(*given, lengths)
    assert y.dtype == dtype and y.is_contiguous()
    expected = by_definition(q, k, v, documents or [[S]] * B)
    tolerance = 1e-12 if dtype == torch.float64 else 0.03
    numpy.testing.assert_allclose(y.double().cpu(), expected, rtol=tolerance, atol=tolerance)


def _of_a_share(
    cases: list[tuple[str, int, list[list[int]] | None]], length: int
) -> list[list[numpy.ndarray]]:
    """By case: the output for this rank's share of sequences, and the gradients of its q, k, v."""
    found = []
    cp = torch.distributed.group.WORLD
    share = zigzag(length, cp.size(), cp.rank())
    for backend, groups, documents in cases:
        built = attention(backend, groups)
        built.cp = cp
        whole, dy = _inputs(groups, length)
        mine = [take(x, share).requires_grad_() for x in whole]
        lengths = torch.tensor(sum(documents, [])) if documents else None
        y = built(*mine, lengths)
        gradients = torch.autograd.grad(y, mine, take(dy, share))
        found.append([x.detach().numpy() for x in (y, *gradients)])
    return found


def _inputs(groups: int, length: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v and the gradient of the output, in fp64."""
    rng = numpy.random.default_rng(0)
    shapes = [(length, B, heads, C) for heads in (H, groups, groups)] + [(length, B, H * C)]
    *qkv, dy = (torch.from_numpy(rng.normal(size=shape)) for shape in shapes)
    return qkv, dy


@pytest.mark.parametrize("world", rest_in_full([2, 3], 2))
def test_ranks_share_the_sequences(world: int) -> None:
    """Chunks longer than a strip of queries are in `test_strips_of_queries`."""
    length = 12
    documents = [[4, 8], [1, 6, 2, 3]]
    cases = [("auto", 2, None), ("flash", 1, documents), ("unfused", H, documents)]
    ranks = run_distributed(world, _of_a_share, cases, length)
    for number, (backend, groups, own) in enumerate(cases):
        whole, dy = _inputs(groups, length)
        leaves = [x.requires_grad_() for x in whole]
        lengths = torch.tensor(sum(own, [])) if own else None
        y = attention(backend, groups)(*leaves, lengths)
        expected = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
        definition = by_definition(*(x.detach().numpy() for x in whole), own or [[length]] * B)
        numpy.testing.assert_allclose(expected[0], definition, rtol=1e-12, atol=1e-12)
        for rank, found in enumerate(ranks):
            share = zigzag(length, world, rank)
            for mine, every in zip(found[number], expected, strict=True):
                numpy.testing.assert_allclose(mine, take(every, share), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strip", [1, 3, 4, 100])
def test_strips_of_queries(monkeypatch: pytest.MonkeyPatch, strip: int) -> None:
    monkeypatch.setattr("moe_parallel.model.attention.STRIP", strip)
    _strip.cache_clear()
    q, k, v = (x.permute(1, 2, 0, 3) for x in _inputs(2, S)[0])
    built = attention("flash", 2)
    with sdpa_kernel(built.kernels):
        late = built._attend(q[:, :, 2:], k, v)
        torch.testing.assert_close(late, built._attend(q, k, v)[:, :, 2:], rtol=1e-12, atol=1e-12)
    _strip.cache_clear()


@pytest.mark.parametrize("native", [True, False])
def test_bf16_with_and_without_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr("moe_parallel.platform.device.multiplies_bf16", lambda x: native)
    rng = numpy.random.default_rng(0)
    given = [torch.from_numpy(rng.normal(size=(S, B, heads, C))).bfloat16() for heads in (H, 2, 2)]
    y = attention("auto", 2)(*given, torch.tensor(sum(DOCUMENTS, [])))
    assert y.dtype == torch.bfloat16
    exact = by_definition(*(x.double().numpy() for x in given), DOCUMENTS)
    numpy.testing.assert_allclose(y.double(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("dtype", "by_native", "tolerance"),
    [(torch.float32, [64, 130], 1e-5), (torch.bfloat16, [64, 63, 6, 130, 3], 0.03)],
    ids=["fp32", "bf16"],
)
def test_documents_take_the_native_operator_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, by_native: list[int], tolerance: float
) -> None:
    lengths = torch.tensor([64, 63, 6, 130, 3])
    found: list[int] = []

    class Counting:
        def attention(self, q: torch.Tensor, *others: Any) -> torch.Tensor:
            found.append(len(q))
            return select_backend("native").attention(q, *others)

    monkeypatch.setattr("moe_parallel.platform.device.multiplies_bf16", lambda x: True)
    monkeypatch.setattr(attention_backends, "serves", lambda *x: True)
    monkeypatch.setattr(attention_backends, "select_backend", lambda name: Counting())
    inputs, dy = _inputs(2, 133)
    results = {}
    for backend, as_type in (("auto", dtype), ("unfused", torch.float64)):
        leaves = [x.to(as_type).requires_grad_() for x in inputs]
        y = attention(backend, 2)(*leaves, lengths)
        results[backend] = (y, *torch.autograd.grad(y, leaves, dy.to(as_type)))
    assert found == by_native
    for actual, expected in zip(*results.values(), strict=True):
        assert actual.dtype == dtype
        bound = tolerance * expected.abs().max().item()
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("lengths", [None, torch.tensor([100, 157])], ids=["one", "several"])
@pytest.mark.parametrize("groups", [H, 1])
@pytest.mark.parametrize("backend", ["auto", "flash"])
def test_nothing_of_size_s_by_s_is_kept(
    backend: str, groups: int, lengths: torch.Tensor | None
) -> None:
    length = 257
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    given = [torch.randn(length, 1, heads, C, requires_grad=True) for heads in (H, groups, groups)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(backend, groups)(*given, lengths)
    assert kept and max(tensor.numel() for tensor in kept) <= length * H * C


CASES: dict[int, dict[str, Options]] = {
    1: {"one": ONE},
    2: {name: LAYOUTS[2][name] for name in ("tp2, sp", "pp2, virtual, recompute")},
}


@pytest.mark.parametrize("world", rest_in_full(CASES, 1))
def test_a_model_trains_as_with_megatrons_attention(tmp_path: Path, world: int) -> None:
    options = model("aoe")
    begun = make_start(options | {"attention_backend": "local"} | ONE, tmp_path)
    cases = {
        f"{backend}, {name}": options | {"attention_backend": backend} | spread
        for name, spread in CASES[world].items()
        for backend in ON_CPU
    }
    assert differences(run_all(world, begun, cases), begun.on_one_rank) == {}


@pytest.mark.parametrize("system", ["topk", "aoe"])
def test_a_token_sees_nothing_of_another_document(system: str) -> None:
    cases = {
        (backend, own): model(system)
        | {"attention_backend": backend, "reset_attention_mask": own}
        | {"num_layers": 2, "moe_layer_freq": 1}
        for backend in (*ON_CPU, "local")
        for own in (True, False)
    }
    (changed,) = run_distributed(1, _what_another_first_document_changes, list(cases.values()))
    # Of two sequences of 8 tokens, the first documents have 3 tokens and 1.
    for (_, own), changed_BS in zip(cases, changed, strict=True):
        assert changed_BS[0, 2] and changed_BS[1, 0]  # these tokens themselves are others
        later = [*changed_BS[0, 3:], *changed_BS[1, 1:]]
        assert not any(later) if own else all(later)


def _what_another_first_document_changes(cases: list[Options]) -> list[numpy.ndarray]:
    return [_change(make_config(SIZES | options)) for options in cases]


def _change(config: Config) -> numpy.ndarray:
    engine = build(config)
    for chunk in engine.chunks:
        chunk.eval()
    (batch, *_) = micro_batches(config, 0, engine)
    first_BS = DOCUMENTS_OF_A_BATCH.eq(0).cumsum(1) == 1
    other = {**batch, "tokens": torch.where(first_BS, 7, batch["tokens"])}
    with torch.no_grad():
        reported = run_micro_batches(
            engine.chunks,
            iter([batch, other]),
            config.training,
            2,
            lambda losses_BS, _: (losses_BS.mean(), {"losses": losses_BS}),
            forward_only=True,
        )
    destroy_groups()
    before_BS, after_BS = (each["losses"] for each in reported)
    # A row's place in its expert's product may change the rounding: by 5e-7 here.
    return ((before_BS - after_BS).abs() > 1e-5).numpy()
