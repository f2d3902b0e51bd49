"""Each operator against its oracle: outputs and gradients in every dtype, layout and thread count.

A setting has the tensors of an operator, a call of it, and the same by the oracle's loops.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_parallel.ops import Ops
from tests.ops.cases import (
    BY_NAME,
    DTYPES,
    LAYOUTS,
    ROUTINGS,
    Routing,
    assert_close,
    error,
    float64,
    gradients,
    random_tensor,
)
from tests.oracles import ops as oracle

pytestmark = pytest.mark.covering


class Setting(NamedTuple):
    leaves: list[Tensor]  # with gradients
    apply: Callable[..., Tensor]  # of the operators and the leaves
    exact: Callable[..., np.ndarray]  # of arrays: the output
    gradients: Callable[..., tuple[np.ndarray, ...]]  # of the output's gradient and arrays


class Tensors(NamedTuple):
    dtype: torch.dtype
    device: str

    def __call__(self, seed: int, *shape: int, wide: bool = False, scale: float = 1) -> Tensor:
        """`wide`: of the dtype of sums."""
        dtype = torch.promote_types(self.dtype, torch.float32) if wide else self.dtype
        tensor = random_tensor(*shape, dtype=dtype, device=self.device, seed=seed)
        return (scale * tensor).requires_grad_()


def _rows(routing: Routing, device: str) -> tuple[list[int], Callable[[Ops], Any]]:
    """The slots by the oracle, and the row map by an operator."""
    given = routing.experts, routing.num_experts, routing.pad_rows_per_expert
    experts = torch.from_numpy(routing.experts).to(device)
    return oracle.routing_map(*given)[0].tolist(), lambda ops: ops.routing_map(experts, *given[1:])


def permute(tensor: Tensors, routing: Routing, width: int) -> Setting:
    slots, row_map = _rows(routing, tensor.device)
    tokens, choices = routing.experts.shape
    return Setting(
        [tensor(0, tokens, width)],
        lambda ops, x: ops.permute(x, row_map(ops)),
        lambda x: oracle.permute(x, slots, choices),
        lambda dy, x: (oracle.permute_gradient(dy, slots, choices, tokens),),
    )


def unpermute(tensor: Tensors, routing: Routing, width: int) -> Setting:
    slots, row_map = _rows(routing, tensor.device)
    return Setting(
        [tensor(0, len(slots), width), tensor(1, *routing.experts.shape, wide=True)],
        lambda ops, y, probs: ops.unpermute(y, row_map(ops), probs),
        lambda y, probs: oracle.unpermute(y, slots, probs),
        lambda dout, y, probs: oracle.unpermute_gradient(dout, y, slots, probs),
    )


def plain_sum(tensor: Tensors, routing: Routing, width: int) -> Setting:
    slots, row_map = _rows(routing, tensor.device)
    ones = np.ones(routing.experts.shape)
    return Setting(
        [tensor(0, len(slots), width)],
        lambda ops, y: ops.unpermute(y, row_map(ops)),
        lambda y: oracle.unpermute(y, slots, ones),
        lambda dout, y: oracle.unpermute_gradient(dout, y, slots, ones)[:1],
    )


def grouped_gemm(tensor: Tensors, counts: list[int], inner: int, outer: int) -> Setting:
    return Setting(
        [tensor(0, sum(counts), inner), tensor(1, len(counts), inner, outer)],
        lambda ops, x, w: ops.grouped_gemm(x, w, torch.tensor(counts, device=tensor.device)),
        lambda x, w: oracle.grouped_gemm(x, w, counts),
        lambda dy, x, w: oracle.grouped_gemm_gradient(dy, x, w, counts),
    )


def norms(tensor: Tensors, tokens: int, width: int, experts: int, rank: int) -> Setting:
    return Setting(
        [tensor(0, tokens, width), tensor(1, experts, width, rank)],
        lambda ops, x, w: ops.norm_topk(x, w, 1).norms_TE,
        oracle.norms,
        oracle.norms_gradient,
    )


def swiglu(tensor: Tensors, rows: int, width: int) -> Setting:
    return Setting(
        [tensor(0, rows, width, scale=4), tensor(1, rows, width), tensor(3, rows, wide=True)],
        lambda ops, *given: ops.swiglu(*given),
        oracle.swiglu,
        oracle.swiglu_gradient,
    )


def swiglu_without_probs(tensor: Tensors, rows: int, width: int) -> Setting:
    return Setting(
        [tensor(0, rows, width, scale=4), tensor(1, rows, width)],
        lambda ops, *given: ops.swiglu(*given),
        lambda *given: oracle.swiglu(*given, np.ones(rows)),
        lambda dh, *given: oracle.swiglu_gradient(dh, *given, np.ones(rows))[:2],
    )


def swiglu_halves(tensor: Tensors, rows: int, width: int) -> Setting:
    def gradient(dh: np.ndarray, gate_up: np.ndarray) -> tuple[np.ndarray]:
        halves = np.split(gate_up, 2, axis=1)
        return (np.concatenate(oracle.swiglu_gradient(dh, *halves, np.ones(rows))[:2], 1),)

    return Setting(
        [tensor(0, rows, 2 * width, scale=2)],
        lambda ops, gate_up: ops.swiglu_halves(gate_up),
        lambda gate_up: oracle.swiglu(*np.split(gate_up, 2, axis=1), np.ones(rows)),
        gradient,
    )


def expert_merge(tensor: Tensors, merges: int, experts: int, inner: int, outer: int) -> Setting:
    return Setting(
        [tensor(0, merges, experts, wide=True), tensor(1, experts, inner, outer)],
        lambda ops, *given: ops.expert_merge(*given),
        oracle.expert_merge,
        oracle.expert_merge_gradient,
    )


def rms_norm(tensor: Tensors, rows: int, width: int) -> Setting:
    return Setting(
        [tensor(0, rows, width, scale=4), tensor(2, width)],
        lambda ops, *given: ops.rms_norm(*given, 1e-5),
        lambda *given: oracle.rms_norm(*given, 1e-5),
        lambda dy, *given: oracle.rms_norm_gradient(dy, *given, 1e-5),
    )


def angles_of(length: int, batch: int, width: int, device: str) -> Tensor:
    """Angles in Megatron-Core's layout, far beyond a whole turn: [length, batch, 1, width]."""
    shape = length, batch, 1, width // 2
    half = 40 * random_tensor(*shape, dtype=torch.float32, device=device, seed=9)
    return torch.cat([half, half], dim=-1)


def rotary(tensor: Tensors, length: int, sequences: int, heads: int, groups: int, width: int,
           batch: int = 1) -> Setting:  # fmt: skip
    """`batch`: the number of sequences that have angles of their own."""
    angles = angles_of(length, batch, width, tensor.device)

    def turned(x: np.ndarray, sign: int = 1) -> np.ndarray:
        return oracle.turned(x, sign * float64(angles))

    return Setting(
        [tensor(0, length, sequences, heads, width), tensor(1, length, sequences, groups, width)],
        lambda ops, q, k: torch.cat(ops.rotary(q, k, angles), 2),
        lambda *qk: np.concatenate([turned(each) for each in qk], 2),
        lambda dy, *_: (turned(dy[:, :, :heads], -1), turned(dy[:, :, heads:], -1)),
    )


def split_and_rotate(tensor: Tensors, length: int, sequences: int, heads: int, groups: int,
                     width: int, batch: int = 1) -> Setting:  # fmt: skip
    """Head h of the queries is number h % r of group h / r; a group ends in its key and value."""
    angles = angles_of(length, batch, width, tensor.device)
    each = heads // groups
    places = [h // each * (each + 2) + h % each for h in range(heads)]
    places += [g * (each + 2) + last for last in (each, each + 1) for g in range(groups)]

    def turned(x: np.ndarray, sign: int) -> np.ndarray:
        first = oracle.turned(x[:, :, : heads + groups], sign * float64(angles))
        return np.concatenate([first, x[:, :, heads + groups :]], 2)

    by_head = length, sequences, groups * (each + 2), width

    def gradient(dy: np.ndarray, qkv: np.ndarray) -> tuple[np.ndarray]:
        found = np.zeros(by_head)
        found[:, :, places] = turned(dy, -1)
        return (found.reshape(qkv.shape),)

    return Setting(
        [tensor(0, length, sequences, groups, (each + 2) * width)],
        lambda ops, qkv: torch.cat(ops.split_and_rotate(qkv, angles), 2),
        lambda qkv: turned(qkv.reshape(by_head)[:, :, places], 1),
        gradient,
    )


def attention(tensor: Tensors, length: int, batch: int, heads: int, groups: int, width: int
              ) -> Setting:  # fmt: skip
    """Weights differ by powers of e. There is no kernel for CUDA."""
    scale = width**-0.5
    return Setting(
        [
            tensor(i, length, batch, n, width, scale=2 if i == 0 else 1)
            for i, n in enumerate((heads, groups, groups))
        ],  # fmt: skip
        lambda ops, *qkv: ops.attention(*qkv, scale),
        lambda *qkv: oracle.attention(*qkv, scale),
        lambda dout, *qkv: oracle.attention_gradient(dout, *qkv, scale),
    )


COUNTS = [[3, 5, 2], [0, 4, 0, 1, 0], [0, 0, 17], [0, 0, 0], [n % 4 for n in range(33)]]
ROWS = [(1, 1), (5, 7), (3, 64), (9, 131), (0, 4), (4, 0)]
MANY, PLAIN = BY_NAME["many_experts"], BY_NAME["plain"]
HEADS = [(1, 1, 1, 1, 2), (5, 2, 4, 2, 6), (3, 1, 2, 1, 64), (0, 2, 2, 1, 8), (5, 3, 2, 1, 16, 3)]


class Sizes(NamedTuple):
    """`bf16`: for the comparison with torch; `threads`: enough work for two, {}: it is BLAS's."""

    each: list[tuple[Any, ...]]
    bf16: tuple[Any, ...]
    threads: tuple[Any, ...] = ()
    layouts: tuple[Any, ...] = ()  # if not the second


OPERATORS: dict[Callable[..., Setting], Sizes] = {
    permute: Sizes(
        [*((routing, 7) for routing in ROUTINGS), (PLAIN, 1), (PLAIN, 135)],
        (MANY, 33), (BY_NAME["many_tokens"], 300),
    ),
    unpermute: Sizes(  # more columns than are summed at a time
        [*((routing, 7) for routing in ROUTINGS), (PLAIN, 1), (PLAIN, 135), (PLAIN, 2500)],
        (MANY, 33), (BY_NAME["many_tokens"], 300), (BY_NAME["padded_and_dropped"], 6),
    ),
    plain_sum: Sizes([(routing, 5) for routing in ROUTINGS], (MANY, 33)),
    grouped_gemm: Sizes(
        [(counts, *sizes) for counts in COUNTS for sizes in ((1, 1), (16, 33))],
        ([40, 0, 77, 3], 65, 34), (), ([3, 0, 5], 6, 4),
    ),
    norms: Sizes([(9, 8, 4, 6), (1, 1, 1, 1), (6, 5, 37, 17), (0, 4, 3, 2)], (33, 65, 6, 34), (),
                 (9, 8, 4, 6)),
    swiglu: Sizes(ROWS, (33, 65), (70, 1000)),
    swiglu_without_probs: Sizes(ROWS[:4], (33, 65)),
    swiglu_halves: Sizes(ROWS, (33, 65)),
    expert_merge: Sizes(
        [(1, 1, 1, 1), (2, 4, 5, 7), (9, 3, 16, 33), (0, 3, 2, 2), (3, 8, 70, 90), (2, 3, 0, 4)],
        (4, 5, 33, 65), (3, 4, 100, 90),
    ),
    rms_norm: Sizes([(1, 3), *ROWS[1:5], (64, 16), (130, 33)], (200, 65), (700, 129)),
    rotary: Sizes(HEADS, (20, 2, 2, 2, 64), (300, 2, 4, 2, 64)),
    split_and_rotate: Sizes(HEADS, (20, 2, 2, 2, 64), (300, 2, 4, 2, 64)),
    attention: Sizes(  # blocks have 64 queries and 256 keys
        [*HEADS[:2], (0, 2, 2, 1, 4), (5, 0, 2, 1, 4), (300, 1, 3, 1, 16), (130, 1, 2, 2, 256)],
        (200, 1, 2, 1, 32), (300, 2, 4, 2, 32), (70, 2, 4, 2, 16),
    ),
}  # fmt: skip
LONG = [(attention, (512, 1, 1, 1, 64)), (attention, (1025, 1, 2, 1, 64))]
CASES = [(operator, size) for operator, sizes in OPERATORS.items() for size in sizes.each]


def _ids(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return getattr(value, "__name__", None) or str(value)


@pytest.fixture(autouse=True)
def served(request: pytest.FixtureRequest) -> None:
    given = getattr(request.node, "callspec", None)
    if given and given.params.get("operator") is attention and given.params["device"] == "cuda":
        pytest.skip("attention has no kernel for CUDA")


def passes(ops: Ops, setting: Setting, change: Callable[[Tensor], Tensor] | None = None,
           ones: bool = False) -> tuple[list[Tensor], list[np.ndarray]]:  # fmt: skip
    """The output and the gradients of the leaves, and the same by the oracle.

    `change`: of the memory of what has rows and of the output's gradient. `ones`: the gradient of a
    sum, which is one number for all elements.
    """
    relaid = [change(x) if change and x.dim() > 1 else x for x in setting.leaves]
    out = setting.apply(ops, *relaid)
    given = [float64(x) for x in setting.leaves]
    dout = random_tensor(*out.shape, dtype=out.dtype, device=str(out.device), seed=8)
    if ones:
        dout = torch.ones((), dtype=out.dtype, device=out.device).expand(out.shape)
    found = [out, *gradients(out, change(dout) if change else dout, *setting.leaves)]
    return found, [setting.exact(*given), *setting.gradients(float64(dout), *given)]


def check(ops: Ops, operator: Any, size: tuple[Any, ...], dtype: torch.dtype, device: str) -> None:
    setting = operator(Tensors(dtype, device), *size)
    found, wanted = passes(ops, setting)
    wide = torch.promote_types(dtype, torch.float32)
    assert found[0].dtype == (wide if operator is norms else dtype)
    assert [x.dtype for x in found[1:]] == [x.dtype for x in setting.leaves]
    for actual, expected in zip(found, wanted, strict=True):
        assert_close(actual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("operator", "size"), CASES, ids=_ids)
def test_equals_the_oracle(ops, device, operator, size, dtype):
    check(ops, operator, size, dtype, device)


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("operator", "size"), LONG, ids=_ids)
def test_long_sequences_equal_the_oracle(ops, device, operator, size, dtype):
    check(ops, operator, size, dtype, device)


@pytest.mark.parametrize("layout", [*LAYOUTS, "one number"])
@pytest.mark.parametrize("operator", OPERATORS, ids=_ids)
def test_layouts_of_inputs_and_gradients(ops, device, operator, layout):
    sizes = OPERATORS[operator]
    setting = operator(Tensors(torch.float64, device), *(sizes.layouts or sizes.each[1]))
    found, wanted = passes(ops, setting, LAYOUTS.get(layout), ones=layout == "one number")
    for actual, expected in zip(found, wanted, strict=True):
        assert_close(actual, expected, torch.float64)


@pytest.mark.parametrize("operator", OPERATORS, ids=_ids)
def test_bf16_is_as_exact_as_torchs(reference, native, device, operator):
    setting = operator(Tensors(torch.bfloat16, device), *OPERATORS[operator].bf16)
    own, wanted = passes(native, setting)
    of_torch, _ = passes(reference, setting)
    for mine, its, exact in zip(own, of_torch, wanted, strict=True):
        rounding = 1e-6 * float(np.linalg.norm(exact)) if mine.dtype == torch.float32 else 0
        assert error(mine, exact) <= 2 * error(its, exact) + rounding + 1e-12


@pytest.mark.parametrize(
    "operator", [name for name, sizes in OPERATORS.items() if sizes.threads], ids=_ids
)
def test_threads_do_not_change_a_bit(native, two_threads, operator):
    setting = operator(Tensors(torch.float32, "cpu"), *OPERATORS[operator].threads)
    results = []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        out = setting.apply(native, *setting.leaves)
        results.append([out, *gradients(out, torch.ones_like(out), *setting.leaves)])
    for two, one in zip(*results, strict=True):
        assert torch.equal(two, one)


@pytest.mark.parametrize("operator", [permute, plain_sum, grouped_gemm], ids=_ids)
def test_second_derivatives(ops, device, operator):
    sizes = OPERATORS[operator]
    leaves, apply, *_ = operator(Tensors(torch.float64, device), *(sizes.layouts or (PLAIN, 3)))
    assert torch.autograd.gradgradcheck(lambda *x: apply(ops, *x), leaves, fast_mode=True)


def _calls(ops: Ops) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What an operator says about tensors of other sizes or types, and a call with such tensors."""
    x, probs, ids = torch.zeros(13, 6), torch.zeros(13, 2), torch.arange(26).view(13, 2) % 5
    rows, heads = ops.routing_map(ids, 5), torch.zeros(5, 2, 4, 6)
    angles, counts = torch.zeros(5, 1, 1, 6), torch.tensor([3, 5])
    w, square = torch.zeros(3, 6, 4), torch.zeros(5, 7)
    backward = torch.ops.moe_parallel
    yield "x.* has 12 tokens, the row map 13", lambda: ops.permute(x[1:], rows)
    yield "y.* has 13 rows, the row map 26", lambda: ops.unpermute(x, rows)
    yield "cannot hold 6 of x", lambda: backward.pack_rows(x, probs, ids, *rows[:2], 5, 2, 3)
    yield "x must be float32.* not Int", lambda: ops.permute(x.int(), rows)
    yield "3 experts", lambda: ops.grouped_gemm(x[:8], w, counts)
    yield "sum to 8, but x has 7 rows", lambda: ops.grouped_gemm(x[:7], w[:2], counts)
    yield (
        r"total must have shape \[2, 6, 6\]",
        lambda: backward.grouped_outer_add(w[:2], x[:8], x[:8], counts),
    )
    yield "two equal halves, not 7 columns", lambda: ops.swiglu_halves(square)
    yield "weights are for 2 experts, w has 3", lambda: ops.expert_merge(x[:, :2], w)
    yield "angles must have shape", lambda: ops.rotary(heads, heads, angles[1:])
    yield "must be r .* heads of 6, not 5", lambda: ops.split_and_rotate(heads[..., :5], angles)
    yield r"k must have shape \[5, 2, 4, 6\]", lambda: ops.attention(heads, heads[1:], heads, 1)
    yield "scale must be positive, not 0", lambda: ops.attention(heads, heads, heads, 0)
    yield "labels must be int64", lambda: ops.softmax_gradient(square, x[:5, 0], x[:5, 0], x[:5, 0])
    yield "a has 7 columns, but b takes 5", lambda: ops.product(square, square)
    yield "k must lie in 1..3", lambda: ops.norm_topk(x, w, 4)


@pytest.mark.parametrize("device", ["cpu"])
def test_other_sizes_and_types_are_refused(native, device):
    for said, call in _calls(native):
        with pytest.raises((ValueError, TypeError), match=said):
            call()


@pytest.mark.parametrize("device", ["cpu"])  # on a GPU the host does not wait for the counts
def test_indices_beyond_the_last_are_refused(ops, device):
    rows = ops.routing_map(torch.tensor([[0], [1]]), 2)
    with pytest.raises(IndexError):
        ops.permute(torch.zeros(2, 3), rows._replace(slots_N=rows.slots_N + 100))
    with pytest.raises(IndexError):
        ops.unpermute(torch.zeros(2, 3), rows._replace(rows_TK=rows.rows_TK + 100))
    with pytest.raises(ValueError, match="4 experts"):
        ops.routing_map(torch.tensor([[0], [4]]), 4)
    with pytest.raises(ValueError, match="2 choices, more than its 1 rows"):
        ops.routing_map(torch.tensor([[0], [0], [1]]), 2, 1)
