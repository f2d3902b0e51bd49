"""All-to-all dispatch on several ranks equals local dispatch of all their tokens together."""

from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import distributed as dist

from moe_parallel.dispatch import AllToAllDispatcher, LocalDispatcher
from moe_parallel.ops import extension, select_backend
from moe_parallel.selection.choices import Choices
from tests.distributed import run_distributed

EXPERTS, WIDTH, HIDDEN, CHOICES = 4, 3, 4, 2

BACKENDS = ["reference"] + ["native"] * extension.is_built()


@dataclass(frozen=True)
class Problem:
    """The tokens, choices and probs of every rank, and the direction for the gradients."""

    x: list[torch.Tensor]  # [T, D] of each rank
    experts: list[torch.Tensor]  # [T, K]
    probs: list[torch.Tensor]  # [T, K], above 0
    direction: list[torch.Tensor]  # [T, D]
    pad_rows_per_expert: int | None = None

    @property
    def together(self) -> "Problem":
        parts = (self.x, self.experts, self.probs, self.direction)
        return Problem(*([torch.cat(part)] for part in parts))


@dataclass(frozen=True)
class Found:
    """The results of one rank."""

    rows: list[numpy.ndarray]  # of each expert here [N_e, D + 1]: the token and its probs
    y: numpy.ndarray  # [T, D]
    x_grad: numpy.ndarray
    probs_grad: numpy.ndarray


def problem(name: str, ranks: int) -> Problem:
    generator = torch.Generator().manual_seed(len(name))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tokens = [5 + 2 * rank for rank in range(ranks)]  # different sizes, to make the test strict
    if name == "a rank without tokens":
        tokens[-1] = 0
    experts = [
        torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOICES] for _ in range(t)])
        if t
        else torch.empty(0, CHOICES, dtype=torch.int64)
        for t in tokens
    ]
    if name == "all to one expert":
        experts = [torch.tensor([[2, -1]] * t) for t in tokens]
    elif name == "two idle experts":
        experts = [torch.tensor([[0, 1]] * t) for t in tokens]
    elif name == "a rank that sends nothing":
        experts[0] = torch.full_like(experts[0], -1)
    elif name == "nobody sends anything":
        experts = [torch.full_like(each, -1) for each in experts]
    elif name == "some dropped":
        experts = [
            each.where(torch.rand(each.shape, generator=generator) > 0.4, -1) for each in experts
        ]
    return Problem(
        x=[normal(t, WIDTH) for t in tokens],
        experts=experts,
        probs=[normal(t, CHOICES).abs() + 0.1 for t in tokens],
        direction=[normal(t, WIDTH) for t in tokens],
        pad_rows_per_expert=12 if name == "padded" else None,
    )


NAMES = [
    "plain",
    "padded",
    "some dropped",
    "all to one expert",
    "two idle experts",
    "a rank that sends nothing",
    "nobody sends anything",
    "a rank without tokens",
]

LAYOUTS = {"ep2": (2, 1), "ep4": (4, 1), "etp2": (2, 2), "ep2 x etp2": (4, 2)}  # ranks, shards


def matrices() -> tuple[torch.Tensor, torch.Tensor]:
    """Expert e computes probs * (x W_e) V_e, W [E, D, F], V [E, F, D]; shards split F."""
    generator = torch.Generator().manual_seed(7)
    w = torch.randn(EXPERTS, WIDTH, HIDDEN, generator=generator, dtype=torch.float64)
    return w, torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator, dtype=torch.float64)


def choices_of(experts: torch.Tensor, probs: torch.Tensor) -> Choices:
    """Choices; scores and probabilities have no role in dispatch."""
    nothing = probs.new_zeros(len(probs), EXPERTS)
    return Choices(experts, probs, nothing, nothing)


def arrived(rows: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tokens and probs that each expert here takes, by loops over the row map."""
    tokens, probs, first = [], [], 0
    num_choices = rows.row_map.rows_TK.shape[1]
    x_and_nothing = torch.cat([rows.x_MD, torch.zeros(1, rows.x_MD.shape[1])])
    probs_and_nothing = torch.cat([rows.probs_MJ.flatten(), torch.zeros(1)])
    for count in rows.row_map.counts_E.tolist():
        slots = rows.row_map.slots_N[first : first + count].tolist()
        tokens.append(x_and_nothing[[-1 if slot < 0 else slot // num_choices for slot in slots]])
        probs.append(probs_and_nothing[[-1 if slot < 0 else slot for slot in slots]])
        first += count
    return tokens, probs


def compute(rows: Any, first: int, shard: slice) -> torch.Tensor:
    w, v = matrices()
    y_MD = 0 * rows.x_MD * rows.probs_MJ.sum(1, keepdim=True)  # differentiable without rows too
    experts = [e for e, n in enumerate(rows.row_map.counts_E.tolist()) for _ in range(n)]
    for m, here in enumerate(rows.row_map.rows_TK.tolist()):
        for j, row in enumerate(here):
            if row >= 0:
                e = first + experts[row]
                result = rows.x_MD[m] @ w[e][:, shard] @ v[e][shard]
                y_MD = y_MD.index_add(0, torch.tensor([m]), (rows.probs_MJ[m, j] * result)[None])
    return y_MD


def solve(dispatcher: Any, task: Problem, rank: int, first: int, shard: slice) -> Found:
    x = task.x[rank].clone().requires_grad_()
    probs = task.probs[rank].clone().requires_grad_()
    choices = choices_of(task.experts[rank], probs)
    rows = dispatcher.dispatch(x, choices, task.pad_rows_per_expert)
    y = dispatcher.combine(compute(rows, first, shard), rows.route)
    (y * task.direction[rank]).sum().backward()
    seen = [torch.cat([x, g[:, None]], 1).detach() for x, g in zip(*arrived(rows), strict=True)]
    return Found(
        [part.numpy() for part in seen],
        y.detach().numpy(),
        x.grad.numpy(),
        probs.grad.numpy(),
    )


def _solve_all(shards: int, tasks: list[Problem]) -> list[Found]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first = rank // shards * (EXPERTS * shards // ranks)
    size = HIDDEN // shards
    shard = slice(rank % shards * size, (rank % shards + 1) * size)
    return [
        solve(
            AllToAllDispatcher(EXPERTS, dist.group.WORLD, shards, select_backend(backend)),
            task,
            rank,
            first,
            shard,
        )
        for backend in BACKENDS
        for task in tasks
    ]


def solve_together(task: Problem) -> Found:
    dispatcher = LocalDispatcher(EXPERTS, select_backend("reference"))
    return solve(dispatcher, task.together, 0, 0, slice(None))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_local_dispatch_of_all_tokens(layout):
    ranks, shards = LAYOUTS[layout]
    tasks = [problem(name, ranks) for name in NAMES]
    solved = run_distributed(ranks, _solve_all, shards, tasks)
    for number, found in enumerate(zip(*solved, strict=True)):
        name, task = NAMES[number % len(NAMES)], tasks[number % len(NAMES)]
        _compare(found, task, solve_together(task), shards, f"{name} under {layout}")


def _compare(found: Any, task: Problem, wanted: Found, shards: int, name: str) -> None:
    for part in ("y", "x_grad", "probs_grad"):
        together = numpy.concatenate([getattr(rank, part) for rank in found])
        numpy.testing.assert_allclose(
            together, getattr(wanted, part), rtol=1e-12, atol=1e-12, err_msg=f"{part}: {name}"
        )
    here = EXPERTS * shards // len(found)
    for expert, rows in enumerate(wanted.rows):
        for shard in range(shards):
            seen = found[expert // here * shards + shard].rows[expert % here]
            if task.pad_rows_per_expert is not None:
                assert len(seen) == task.pad_rows_per_expert * len(found), name
                padding = seen[:, -1] == 0
                assert (seen[padding] == 0).all(), name
                seen = seen[~padding]
            numpy.testing.assert_array_equal(_sorted(seen), _sorted(rows), err_msg=name)


def _sorted(rows: numpy.ndarray) -> numpy.ndarray:
    return rows[numpy.lexsort(rows.T)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_local_dispatch_equals_loops(name, backend):
    task = problem(name, 1)
    found = solve(LocalDispatcher(EXPERTS, select_backend(backend)), task, 0, 0, slice(None))
    w, v = (part.numpy() for part in matrices())
    x, probs, experts = task.x[0].numpy(), task.probs[0].numpy(), task.experts[0].numpy()
    y, rows = numpy.zeros_like(x), [[] for _ in range(EXPERTS)]
    probs_grad, x_grad = numpy.zeros_like(probs), numpy.zeros_like(x)
    for t, token in enumerate(x):
        for k, expert in enumerate(experts[t]):
            if expert < 0:
                continue
            matrix = w[expert] @ v[expert]
            rows[expert].append([*token, probs[t, k]])
            y[t] += probs[t, k] * token @ matrix
            probs_grad[t, k] = token @ matrix @ task.direction[0].numpy()[t]
            x_grad[t] += probs[t, k] * matrix @ task.direction[0].numpy()[t]
    if task.pad_rows_per_expert is not None:
        rows = [
            each + [[0.0] * (WIDTH + 1)] * (task.pad_rows_per_expert - len(each)) for each in rows
        ]
    for mine, seen in zip(rows, found.rows, strict=True):  # in the order of tokens, padding last
        numpy.testing.assert_array_equal(seen, numpy.reshape(mine, (-1, WIDTH + 1)))
    for part, expected in (("y", y), ("x_grad", x_grad), ("probs_grad", probs_grad)):
        numpy.testing.assert_allclose(getattr(found, part), expected, rtol=1e-12, atol=1e-12)


def _sent() -> int:
    task, rank = problem("some dropped", dist.get_world_size()), dist.get_rank()
    dispatcher = AllToAllDispatcher(EXPERTS, dist.group.WORLD, 1, select_backend("reference"))
    choices = choices_of(task.experts[rank], task.probs[rank])
    return dispatcher.dispatch(task.x[rank], choices, None).wire_bytes


def test_bytes_on_the_wire():
    """A token goes once to the other rank: three fp64, two experts in 8 bytes, their probs; three
    fp64 come back."""
    task, there, back = problem("some dropped", 2), 24 + 8 + 16, 24
    away = [
        int(((task.experts[r] // 2 == 1 - r) & (task.experts[r] >= 0)).any(1).sum()) for r in (0, 1)
    ]
    assert 0 < away[0] < int((task.experts[0] >= 0).sum())
    for rank, sent_bytes in enumerate(run_distributed(2, _sent)):
        assert sent_bytes == away[rank] * there + away[1 - rank] * back
