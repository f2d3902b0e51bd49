"""A placement: which experts share a rank, and a checkpoint in that order, for every system."""

import json
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.utils import unwrap_model

from moe_parallel.errors import InputError
from moe_parallel.telemetry.metrics import read_metrics
from moe_parallel.telemetry.router_trace import read_trace
from moe_parallel.training.checkpoint.folder import CheckpointFolder
from moe_parallel.training.checkpoint.index import read_index, stored_shapes
from moe_parallel.training.checkpoint.placement import (
    LOAD_BOUND,
    NAMES,
    PlacedLayer,
    Placement,
    Visits,
    fit_layer,
    place,
    visits,
)
from moe_parallel.training.checkpoint.tensors import whole_tensor
from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, small_data
from tests.systems import SYSTEMS, merges, options
from tests.tiers import rest_in_full
from tests.training.tiny_run import Layout, TinyRun
from tools.checkpoint import main

E = 6
SMALLER = {"num_layers": 3, "moe_layer_freq": "[0]+[1]*2", "num_experts": E}
ORDERS = {1: [4, 2, 0, 5, 1, 3], 2: [1, 0, 3, 5, 4, 2]}  # by layer, from 0
#: The coupling loss draws noise for the place of an expert, not for the expert.
OTHER = {"topk": {"moe_erc_loss_coeff": 0.0, "bf16": True}}
PLACED = [name for name in SYSTEMS if not merges(name) and "groups" not in name]


def _steps(run: TinyRun) -> tuple[list[tuple[float, float]], list[dict[str, Any]]]:
    """The losses of three steps, and what the layers counted."""
    run.engine.statistics.training.clear()
    losses = run.steps(3)
    layers = run.engine.statistics.training.reduced([None]).summaries()
    run.close()
    return losses, layers


def _continued_twice(folder: Path, system: dict[str, Any]) -> tuple[Any, Any]:
    run = TinyRun(Layout(), folder / "run", options=SMALLER | system)
    run.steps(2)
    checkpoint = run.save()
    before = _steps(run)
    unknown = Visits(0, 0)
    layers = [
        PlacedLayer(layer + 1, np.array(order), unknown, unknown) for layer, order in ORDERS.items()
    ]
    placed = place(
        checkpoint, CheckpointFolder(folder / "placed"), Placement(layers, range(1), range(1))
    )
    run = TinyRun(Layout(), folder / "placed", options=SMALLER | system)
    run.load(placed)
    return before, _steps(run)


@pytest.mark.parametrize(
    "name",
    rest_in_full(PLACED, "topk", "aoe, free experts", "hash", "threshold", "uoe"),
)
def test_the_same_model_in_another_order(name: str, tmp_path: Path) -> None:
    system = options(name) | OTHER.get(name, {})
    ((before, after),) = run_distributed(1, _continued_twice, tmp_path, system)
    is_half = "bf16" in system
    np.testing.assert_allclose(after[0], before[0], rtol=1e-3 if is_half else 2e-6)
    for (layer, order), was, now in zip(ORDERS.items(), before[1], after[1], strict=True):
        assert was["layer"] == now["layer"] == layer + 1
        counted = np.array(was["tokens_per_expert"])
        np.testing.assert_allclose(
            now["tokens_per_expert"], counted[order], atol=2 if is_half else 0
        )
    _check_tensors(tmp_path / "run" / "iter_0000002", tmp_path / "placed" / "iter_0000002")


def _check_tensors(one: Path, other: Path) -> None:
    """Experts are found by their number, which no other first axis has; free ones may follow."""
    shapes = stored_shapes(one)
    assert stored_shapes(other) == shapes
    ordered = 0
    for key, shape in shapes.items():
        was, now = (whole_tensor(read_index(folder), key, folder) for folder in (one, other))
        layer = key.partition("decoder.layers.")[2].partition(".")[0]
        order = ORDERS.get(int(layer or 0)) if ".mlp." in key else None
        free = any(part in key for part in (".bias_E", ".error_E", ".share_E", ".w_router_ED"))
        if order and key.endswith("experts_VK"):
            assert torch.equal(torch.tensor(order)[now], was)
            ordered += 1
        elif order and (shape[0] == E or free):
            assert torch.equal(now[:E], was[order]) and torch.equal(now[E:], was[E:]), key
            ordered += 1
        else:
            assert torch.equal(now, was), key
    assert ordered >= 3 * 4


def _cost(chosen_TE: Any, rank_E: Any, ranks: int) -> float:
    """The sum in the description of the module, token by token."""
    rows, load_R = 0, [0] * ranks
    for chosen_E in chosen_TE:
        here = [int(rank_E[expert]) for expert in np.flatnonzero(chosen_E)]
        rows += len(set(here))
        for rank in here:
            load_R[rank] += 1
    most = LOAD_BOUND * sum(load_R) / ranks
    return rows + ranks * sum(max(0.0, load - most) for load in load_R)


def _choices(tokens: int, n: int, seed: int) -> Any:
    """Tokens of four kinds, which choose from other experts, some more often than others."""
    draw = np.random.default_rng(seed)
    liking_CE = draw.normal(size=(4, n)) * 2 + draw.normal(size=n)
    scores_TE = liking_CE[draw.integers(4, size=tokens)] + draw.gumbel(size=(tokens, n))
    return scores_TE > np.sort(scores_TE, axis=1)[:, [-4]]  # three each


@pytest.mark.parametrize(("n", "ranks"), [(6, 2), (6, 3), (8, 4), (12, 3)])
def test_no_exchange_of_two_experts_costs_less(n: int, ranks: int) -> None:
    chosen_TE = _choices(300, n, seed=n * ranks)
    order_E = fit_layer(chosen_TE, ranks)
    assert sorted(order_E) == list(range(n))
    rank_E = order_E.argsort() // (n // ranks)
    best = _cost(chosen_TE, rank_E, ranks)
    assert best <= _cost(chosen_TE, np.arange(n) // (n // ranks), ranks)
    for i, j in combinations(range(n), 2):
        other_E = rank_E.copy()
        other_E[[i, j]] = rank_E[[j, i]]
        assert _cost(chosen_TE, other_E, ranks) > best - 1, (i, j)
    if n == 6:
        places = (np.array(each) // (n // ranks) for each in permutations(range(n)))
        assert best <= 1.02 * min(_cost(chosen_TE, each, ranks) for each in places)


def test_experts_of_a_kind_share_a_rank() -> None:
    """Twelve experts of three kinds with mixed numbers; a token chooses two of one kind."""
    pairs = [(kind + 3 * a, kind + 3 * b) for kind in range(3) for a in range(4) for b in range(a)]
    chosen_TE = np.zeros((len(pairs) * 5, 12), dtype=bool)
    for token, pair in enumerate(pairs * 5):
        chosen_TE[token, pair] = True
    order_E = fit_layer(chosen_TE, 3)
    assert order_E.tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    before, after = (visits([chosen_TE], each, 3) for each in (np.arange(12), order_E))
    # Of two experts of a kind that are not 0 and 3 or the like, four of six pairs, none share one.
    assert after == Visits(1.0, 1.0) and before.rows > 1.6


def test_a_rank_is_not_given_all_busy_experts() -> None:
    """Experts 0 and 1 are chosen together by most tokens, and each rank has room for two."""
    chosen_TE = np.zeros((100, 4), dtype=bool)
    chosen_TE[:90, :2] = True
    chosen_TE[90:, 2:] = True
    order_E = fit_layer(chosen_TE, 2)
    assert {0, 1} != set(order_E[:2]) and visits([chosen_TE], order_E, 2).imbalance == 1.0


RUN = SMALL | {"num_experts": 8, "lr": 2e-3, "train_iters": 6, "eval_iters": 0}
EP = {"expert_model_parallel_size": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run`, stopped after three recorded steps, and the data."""
    folder = tmp_path_factory.mktemp("placed")
    trace = {"moe_router_trace": folder / "trace", "exit_interval": 3, "save": folder / "run"}
    (ends,) = run_distributed(1, pretrain_here, [RUN | small_data(folder) | trace])
    assert ends[0][0] == 0
    return folder


def test_a_placed_run_sends_the_rows_that_its_placement_says(run: Path, capsys: Any) -> None:
    command = ["place", run / "run", run / "placed", "--trace", run / "trace"]
    assert main([*map(str, command), "--expert-model-parallel-size", "2"]) == 0
    _, first, second, steps, _ = capsys.readouterr().out.splitlines()
    assert steps == "fitted to the steps 1 to 2, measured on 3 to 3"
    assert [line.split()[0] for line in (first, second)] == ["1", "2"]
    given = [
        RUN | EP | small_data(run) | {"load": run / "run", "moe_router_trace": run / "later"},
        RUN | EP | small_data(run) | {"load": run / "placed", "moe_router_trace": "none"},
    ]
    folders = [run / "went on", run / "placed went on"]
    for each, folder in zip(given, folders, strict=True):
        each |= {"save": folder, "exit_interval": 5}
    run_distributed(2, pretrain_here, given)
    before, after = (
        [each for each in read_metrics(folder / "metrics.jsonl") if "layers" in each]
        for folder in folders
    )
    names = json.loads((run / "placed" / NAMES).read_text())
    later = read_trace(run / "later", "")
    assert [each["iteration"] for each in before] == [4, 5] == list(later.iterations)
    for was, now in zip(before, after, strict=True):
        np.testing.assert_allclose(now["lm_loss"], was["lm_loss"], rtol=2e-6)
        experts_LNSK = later.step(was["iteration"]).experts_LNSK
        for one, other, experts_NSK in zip(was["layers"], now["layers"], experts_LNSK, strict=True):
            order = names[str(one["layer"])]
            counted = np.array(one["tokens_per_expert"])
            assert other["tokens_per_expert"] == counted[order].tolist()
            sent = _sent_to_the_other_rank(experts_NSK, np.arange(8))
            sent_placed = _sent_to_the_other_rank(experts_NSK, np.argsort(order))
            assert sent != sent_placed
            ratio = other["wire_bytes_per_token"] / one["wire_bytes_per_token"]
            np.testing.assert_allclose(ratio, sent_placed / sent)


def _sent_to_the_other_rank(experts_NSK: Any, number_E: Any) -> int:
    """The tokens with an expert on the rank of ep 2 that is not theirs; each rank takes two
    sequences in turn, and experts of numbers from 4 on are on rank 1."""
    away = 0
    for sequence, experts_SK in enumerate(number_E[experts_NSK]):
        home = sequence // 2 % 2
        away += int((experts_SK // 4 != home).any(axis=1).sum())
    return away


def test_names_count_from_the_first_placement(tmp_path: Path) -> None:
    (measured,) = run_distributed(1, _placed_twice, tmp_path)
    assert measured == [ORDERS[1][expert] for expert in ORDERS[1]]


def _placed_twice(folder: Path) -> list[int]:
    run = TinyRun(Layout(), folder / "run", options=SMALLER)
    checkpoint = run.save()
    run.close()
    layers = [PlacedLayer(2, np.array(ORDERS[1]), Visits(0, 0), Visits(0, 0))]
    for name in ("once", "twice"):
        placement = Placement(layers, range(1), range(1))
        checkpoint = place(checkpoint, CheckpointFolder(folder / name), placement)
    names: dict[str, list[int]] = json.loads((folder / "twice" / NAMES).read_text())
    return names["2"]


REFUSED = {
    "dense": ({"num_experts": None, "moe_router_topk": None, "moe_ffn_hidden_size": None}, "2",
        "the checkpoint is of a dense model: there are no experts to place"),
    "merged": ({"expert_selection": "lory", "moe_router_topk": None, "lory_segment_length": 8}, "2",
        "--expert-selection lory merges its experts and sends no token to another rank: there is "
        "nothing to place"),
    "groups": ({"moe_router_num_groups": 2, "moe_router_group_topk": 1}, "2",
        "--moe-router-num-groups makes groups of experts with neighboring numbers: in another "
        "order the model would choose others"),
    "ranks": ({}, "3",
        "--expert-model-parallel-size is 3: it must be at least 2 and divide --num-experts 8"),
    "another trace": ({"num_experts": 16}, "2",
        "--trace FOLDER is of a run with --num-experts 8, and this run has 16: use the same, or "
        "another trace"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_placed_is_refused(
    case: str, run: Path, tmp_path: Path, capsys: Any
) -> None:
    changed, ranks, message = REFUSED[case]
    options = RUN | small_data(run) | {"save": tmp_path / "run", "exit_interval": 1} | changed
    run_distributed(1, pretrain_here, [options])
    words = ["place", tmp_path / "run", tmp_path / "placed", "--trace", run / "trace"]
    assert main([*map(str, words), "--expert-model-parallel-size", ranks]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error == f"checkpoint.py: {message.replace('FOLDER', str(run / 'trace'))}"
    assert not (tmp_path / "placed").exists()


def test_a_tensor_whose_name_says_no_axes_is_refused(tmp_path: Path) -> None:
    (said,) = run_distributed(1, _refused_tensor, tmp_path)
    assert "decoder.layers.1.mlp.liking has 1 axes, which its name does not list" in said


def _refused_tensor(folder: Path) -> str:
    run = TinyRun(Layout(), folder / "run", options=SMALLER)
    (chunk,) = unwrap_model(run.engine.chunks)
    chunk.decoder.layers[1].mlp.register_buffer("liking", torch.zeros(E))
    checkpoint = run.save()
    run.close()
    layers = [PlacedLayer(2, np.array(ORDERS[1]), Visits(0, 0), Visits(0, 0))]
    with pytest.raises(InputError) as caught:
        placement = Placement(layers, range(1), range(1))
        place(checkpoint, CheckpointFolder(folder / "placed"), placement)
    return str(caught.value)
