"""Digests of a state, and copies that differ."""

import hashlib
import itertools
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from moe_parallel.training.checkpoint.digest import (
    _astray,
    astray,
    checkpoint_digest,
    odd_numbers,
    state_digest,
    tensor_sum,
)
from moe_parallel.training.checkpoint.optimizer import pieces
from moe_parallel.training.checkpoint.state import model_tensors
from tests.distributed import run_distributed
from tests.training.tiny_run import AOE, OVERLAP, Layout, TinyRun

CPU = torch.device("cpu")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def _odd_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") | 1


def _odd_number(axis: int, index: int) -> int:
    """SplitMix64 as in the paper, on Python's integers."""
    x = (_odd_of(f"axis {axis}") + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return (x ^ (x >> 31)) | 1


def _by_hand(key: str, values: torch.Tensor, offsets: tuple[int, ...]) -> int:
    """The definition, an element at a time."""
    if values.dim() == 0:
        values, offsets = values[None], (0,)
    words = values.contiguous().view(INTEGERS[values.element_size()])
    if values.element_size() == 8:
        offsets = (*offsets[:-1], 2 * offsets[-1])
    total = 0
    for index in itertools.product(*map(range, words.shape)):
        term = int(words[index]) * _odd_of(key)
        for axis, (first, i) in enumerate(zip(offsets, index, strict=True)):
            term *= _odd_number(axis, first + i)
        total += term
    return total % 2**64


def test_the_factors_of_an_axis() -> None:
    found = odd_numbers(2, 5, 4, CPU)
    assert [x % 2**64 for x in found.tolist()] == [_odd_number(2, 5 + i) for i in range(4)]


@pytest.mark.parametrize(
    ("shape", "offsets"), [((), ()), ((5,), (7,)), ((2, 3), (0, 4)), ((2, 3, 4), (1, 0, 8))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_a_sum_is_that_of_the_definition(
    shape: tuple[int, ...], offsets: tuple[int, ...], dtype: torch.dtype
) -> None:
    values = (100 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    assert int(tensor_sum("a.b", values, offsets)) % 2**64 == _by_hand("a.b", values, offsets)


def test_parts_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(3, 5, 7)
    expected = tensor_sum("w", whole, (0, 0, 0))
    monkeypatch.setitem(tensor_sum.__globals__["AT_ONCE"], "cpu", 20)  # some rows at a time
    parts = [
        tensor_sum("w", whole[a:b, c:d, e:f], (a, c, e))
        for (a, b), (c, d), (e, f) in itertools.product(
            [(0, 1), (1, 3)], [(0, 2), (2, 2), (2, 5)], [(0, 6), (6, 7)]
        )
    ]
    assert sum(parts) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    values = torch.randn(2, 3).to(dtype)
    sums = {int(tensor_sum("w", values, (0, 0)))}
    content = values.view(torch.uint8).flatten()
    for byte, bit in itertools.product(range(len(content)), range(8)):
        changed = content.clone()
        changed[byte] ^= 1 << bit
        sums.add(int(tensor_sum("w", changed.view(dtype).view(2, 3), (0, 0))))
    assert len(sums) == 1 + 8 * len(content)


def test_places_count() -> None:
    """Values that change places: of a tensor, in four corners, and of two tensors."""
    values = torch.randn(4, 4)
    sums = [tensor_sum("w", x, (0, 0)) for x in (values, values.T, values.flip(0), values.flip(1))]
    assert len(set(map(int, sums))) == 4
    corners = values.clone()
    corners[0, 0], corners[0, 1], corners[1, 0], corners[1, 1] = 1.0, 2.0, 2.0, 1.0
    other = corners.clone()
    other[0, 0], other[0, 1], other[1, 0], other[1, 1] = 2.0, 1.0, 1.0, 2.0
    assert tensor_sum("w", corners, (0, 0)) != tensor_sum("w", other, (0, 0))
    one, two = torch.randn(2, 8)
    mine = tensor_sum("a", one, (0,)) + tensor_sum("b", two, (0,))
    assert mine != tensor_sum("a", two, (0,)) + tensor_sum("b", one, (0,))
    minus = torch.tensor([-0.0, -0.0], dtype=torch.float64)
    assert tensor_sum("a", minus, (0,)) != tensor_sum("a", minus.abs(), (0,))


LAYOUTS = {
    "two experts each": (Layout(2, ep=2, distributed=True), {}),
    "whole optimizers": (Layout(2), {}),
    "parameters gathered late": (Layout(2, distributed=True), OVERLAP),
    "matrices in two": (Layout(2, tp=2, etp=2, distributed=True), {}),
    "a pipeline": (Layout(2, pp=2, vpp=2), {}),
}


def _digest_of(run: TinyRun) -> dict[str, str]:
    digest, difference = state_digest(run.engine.chunks, run.engine.optimizer)
    assert difference is None, difference
    return asdict(digest)


def _first_run(path: Path, options: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    run = TinyRun(Layout(), path, options=options)
    run.steps(2)
    run.save()
    digests = _digest_of(run), asdict(checkpoint_digest(path / "iter_0000002"))
    run.steps(1)
    assert _digest_of(run) != digests[0]
    return digests


def _loaded(path: Path, options: dict[str, Any], layouts: list[tuple[Layout, dict]]) -> list:
    digests = []
    for layout, more in layouts:
        run = TinyRun(layout, path, options=options | more)
        run.load(path / "iter_0000002")
        digests.append(_digest_of(run))
        run.close()
    return digests


@pytest.mark.parametrize(
    "options", [AOE, pytest.param({"bf16": True}, marks=pytest.mark.full)], ids=["AoE", "bf16"]
)
def test_every_layout_has_the_digest_of_the_checkpoint(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    ((of_run, of_checkpoint),) = run_distributed(1, _first_run, tmp_path, options)
    assert of_run == of_checkpoint
    assert of_run["weights"] != of_run["optimizer"]
    for of_rank in run_distributed(2, _loaded, tmp_path, options, list(LAYOUTS.values())):
        assert dict(zip(LAYOUTS, of_rank, strict=True)) == dict.fromkeys(LAYOUTS, of_run)


def _flip(tensor: torch.Tensor) -> None:
    tensor.data.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


def _changes(path: Path) -> list[dict[str, str]]:
    """The digests of a state, and of states that differ from it in little, on rank 1 only."""
    run = TinyRun(Layout(2, ep=2, distributed=True), path, options={"num_layers": 4})
    run.steps(1)
    digests = [_digest_of(run)]
    held = pieces(run.engine.optimizer, model_tensors(run.engine.chunks))
    expert = next(p for name, p in run.parameters() if ".experts." in name)
    moments = held[-1].adam.state[held[-1].main]
    on_rank_1 = dist.get_rank() == 1
    for tensor in (expert, moments["exp_avg"], moments["exp_avg_sq"]):
        if on_rank_1:
            _flip(tensor)
        digests.append(_digest_of(run))
        if on_rank_1:
            _flip(tensor)
    named = dict(run.parameters())
    one, other = (named[f"decoder.layers.{i}.mlp.w_router_ED"] for i in (1, 2))
    one.data, other.data = other.data.clone(), one.data.clone()
    digests.append(_digest_of(run))
    one.data, other.data = other.data.clone(), one.data.clone()
    assert _digest_of(run) == digests[0]
    return digests


def test_a_bit_on_one_rank_and_two_tensors_that_change_places(tmp_path: Path) -> None:
    first, second = run_distributed(2, _changes, tmp_path)
    assert first == second
    state, weight, mean, square, exchanged = first
    for of_weights in (weight, exchanged):
        assert of_weights["weights"] != state["weights"]
        assert of_weights["optimizer"] == state["optimizer"]
    for of_moment in (mean, square):
        assert of_moment["weights"] == state["weights"]
        assert of_moment["optimizer"] != state["optimizer"]
    assert len({each["optimizer"] for each in (state, mean, square)}) == 3


TENSORS = {
    "dense": (Layout(2), "decoder.layers.1.self_attention.linear_proj.weight"),
    "distributed": (Layout(2, distributed=True), "decoder.layers.1.mlp.w_router_ED"),
    "router of tp": (Layout(2, tp=2, etp=2), "decoder.layers.1.mlp.w_router_ED"),
    "tied embedding": (Layout(2, pp=2), "embedding.word_embeddings.weight"),
}


def _lines(path: Path) -> dict[str, list[str | None]]:
    """The lines about equal copies, a weight with one bit changed on rank 1, and two of them."""
    lines = {}
    for name, (layout, tensor) in TENSORS.items():
        run = TinyRun(layout, path)
        run.steps(1)

        def line(run: TinyRun = run) -> str | None:
            return state_digest(run.engine.chunks, run.engine.optimizer)[1]

        found = [line()]
        its = dict(run.parameters())
        places = [place for place in its if place.endswith(tensor) or "output_layer" in place]
        for place in (places[-1], "decoder.final_layernorm.weight"):
            if dist.get_rank() == 1 and place in its:
                _flip(its[place])
            found.append(line())
        lines[name] = found
        run.close()
    return lines


def test_a_rank_whose_copy_differs_is_named(tmp_path: Path) -> None:
    first, second = run_distributed(2, _lines, tmp_path)
    assert first == second  # on every rank
    host = socket.gethostname()
    for name, (equal, one, two) in first.items():
        tensor = TENSORS[name][1]
        assert equal is None, name
        assert one is not None and two is not None, name
        assert one.startswith(f"rank 1 on {host} differs from rank 0 in {tensor}, which"), one
        if name != "tied embedding":  # no other rank has a copy of the last norm
            assert f" in {tensor} and 1 more, which" in two, two


A, B, C = -7, 3, 2**40  # ids of tensors
PADDING = 0


def _found(ids: list[list[int]], sums: list[list[int]]) -> dict[int, dict[int, int]]:
    return _astray(torch.tensor(ids), torch.tensor(sums))


def test_equal_copies_and_padding() -> None:
    assert _found([[A, B], [A, PADDING], [B, A]], [[5, -6], [5, 0], [-6, 5]]) == {}


def test_the_most_copies_are_right() -> None:
    assert _found([[A], [A], [A]], [[1], [2], [2]]) == {A: {0: 1}}
    assert _found([[A]] * 5, [[9], [1], [2], [2], [3]]) == {A: {0: 2, 1: 2, 4: 2}}


def test_of_two_the_lower_rank_counts_as_right() -> None:
    assert _found([[A, B], [C, B]], [[1, 2], [1, 3]]) == {B: {1: 0}}
    assert _found([[A]] * 4, [[1], [2], [2], [1]]) == {A: {1: 0, 2: 0}}


def _line(rank_sums: list[dict[str, int]]) -> str | None:
    mine = rank_sums[torch.distributed.get_rank()]
    return astray(list(mine), torch.tensor(list(mine.values())))


def test_the_rank_with_the_most_differences_is_named() -> None:
    """Ranks with other numbers of tensors, in another order."""
    sums = [{"a": 1, "b": 2, "c": 3}, {"b": 2, "d": 0, "c": 4, "a": 0}]
    lines = run_distributed(2, _line, sums)
    assert lines[0] == lines[1]
    assert " differs from rank 0 in " in lines[0] and " and 1 more, which should be" in lines[0]
    assert lines[0].startswith("rank 1 on ")
