"""The requirements of torch.library for an operator: schema, gradient, fake, tracing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import moe_parallel.selection.choices  # noqa: F401  registers "greatest"
from tests.ops.cases import random_tensor

DTYPES = [torch.float32, torch.bfloat16]


def _of_rows(tensor: Callable[..., torch.Tensor], numbers: torch.Tensor) -> dict[str, tuple]:
    """The operators on rows, with a number for each."""
    x, weight = tensor(3, 5), tensor(5)
    return {
        "rms_norm": (x, weight, 1e-5),
        "rms_norm_backward": (x, x, weight, numbers),
        "softmax_sums": (x.detach(),),
        "softmax_gradient": (
            x.detach(),
            torch.tensor([0, 4, -1], device=x.device),
            numbers.detach(),
            numbers,
        ),
        "swiglu": (x, x, numbers),
        "swiglu_backward": (x, x, x, numbers),
        "swiglu_halves": (tensor(3, 6),),
        "swiglu_halves_backward": (tensor(3, 3), tensor(3, 6)),
    }


def arguments(dtype: torch.dtype, device: str) -> dict[str, tuple]:
    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return random_tensor(*shape, dtype=dtype, device=device, seed=0).requires_grad_()

    def main(*shape: int) -> torch.Tensor:  # a main gradient
        return tensor(*shape, dtype=torch.float32).detach()

    slots = torch.tensor([0, 3, -1, 5, 2, -1], device=device)
    rows = torch.tensor([[0, -1], [4, 1], [-1, 3]], device=device)
    numbers = torch.tensor([[1, 0, 3, 2], [4, 5, 6, 7], [2, 3, 0, 1]], device=device)
    visits = torch.tensor([0, 8, 4], device=device)  # of two destinations
    rows_of_visits = torch.tensor([[0], [2], [1]], device=device).expand(-1, 4).clone()
    rows_of_visits[:, 1:] = -1
    counts = torch.tensor([3, 0, 3], device=device)
    probs, norms = tensor(3, 2, dtype=torch.float32), tensor(3, 4, dtype=torch.float32)
    experts, routed = (probs, slots, rows, counts), (tensor(3, 5, 4), tensor(3, 2, 5))
    autonomous = (tensor(3, 4, 2), tensor(3, 5, 2), tensor(3, 2, 5))
    merging = (tensor(2, 3, dtype=torch.float32), tensor(3, 5, 2))
    given = {
        "greatest": (norms.detach(), 2, norms.detach()),
        "routing_map": (rows.clamp(max=3), 4, None, None, None),
        "permute": (tensor(3, 5), slots, rows),
        "unpermute": (tensor(6, 5), slots, rows, probs),
        "unpermute_backward": (tensor(3, 5), tensor(6, 5), slots, rows, probs),
        "visits": (numbers, 4, 2),
        # Rows full of x, four experts and their probs: nothing in them is undefined, or a NaN.
        "pack_rows": (
            *(tensor(3, 4), tensor(3, 4, dtype=torch.float32), numbers, visits, rows_of_visits),
            *(4, 4, 4 + (8 + 4 * probs.element_size()) // dtype.itemsize),
        ),
        "pack_rows_backward": (tensor(3, 24), numbers, visits, rows_of_visits, 5, 4, 4, 4),
        "grouped_gemm": (tensor(6, 5), tensor(3, 5, 2), counts),
        "grouped_outer": (tensor(6, 5), tensor(6, 2), counts),
        "grouped_outer_add": (tensor(3, 5, 2), tensor(6, 5), tensor(6, 2), counts),
        **_of_attention(tensor(3, 2, 4, 2), tensor(3, 2, 2, 2), main(2, 4, 3)),
        "product": (tensor(6, 2), tensor(6, 5), tensor(5, 2), True),
        **_of_rows(tensor, probs[:, 0]),
        **_of_rotation(tensor(3, 2, 4, 6), tensor(3, 2, 2, 24), main(3, 1, 1, 6)),
        "expert_merge": merging,
        "expert_merge_backward": (tensor(2, 5, 2), *merging),
        **_of_norm_topk(tensor, norms, slots, rows),
        "routed_experts": (tensor(3, 5), *experts, *routed, None, None),
        "routed_experts_backward": (
            *(tensor(3, 5), tensor(3, 5), *experts, *routed, tensor(6, 4)),
            *(main(3, 5, 4), main(3, 2, 5), False),
        ),
        "autonomous_experts": (
            *(tensor(3, 5), *experts, tensor(3, 5, 4), *autonomous, *(None,) * 5, True),
        ),
        "autonomous_experts_backward": (
            *(tensor(3, 5), tensor(3, 5), *experts, None, *autonomous, tensor(3, 2, 4), None),
            *(tensor(6, 2), tensor(0, 4), tensor(0, 2)),
            *(main(3, 4, 2), None, main(3, 2, 5)),
        ),
    }
    # They have no gradient of their own; the gradient of norm_topk is the Python function's.
    once = [
        name
        for name in given
        if name in ("norm_topk", "product") or name.endswith(("backward", "add", "gradient"))
    ]
    return given | {name: tuple(map(_detached, given[name])) for name in once}


def _of_attention(q: torch.Tensor, k: torch.Tensor, logsumexp: torch.Tensor) -> dict[str, tuple]:
    v, out = k.detach().clone().requires_grad_(), q.detach().clone().requires_grad_()
    return {"attention": (q, k, v, 0.5), "attention_backward": (out, q, k, v, out, logsumexp, 0.5)}


def _of_rotation(q: torch.Tensor, qkv: torch.Tensor, angles: torch.Tensor) -> dict[str, tuple]:
    k = q[:, :, :1].detach().clone().requires_grad_()
    kv = q[:, :, :2].detach().clone()
    return {
        "rotary": (q, k, angles, False),
        "split_and_rotate": (qkv, angles),
        "split_and_rotate_backward": (q, kv, kv.clone(), angles),
    }


def _of_norm_topk(
    tensor: Callable[..., torch.Tensor],
    norms: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
) -> dict[str, tuple]:
    x, w, c_TKR = tensor(3, 5), tensor(4, 5, 2), tensor(3, 2, 2)
    counts = torch.tensor([3, 0, 3, 0], device=x.device)
    experts = rows.clamp(max=3)
    return {
        "norm_topk": (x, w, 2, norms[0], "all"),
        "norm_topk_backward": (
            norms,
            c_TKR,
            x,
            w,
            norms.abs(),
            experts.clamp(min=0),
            tensor(3, 4, 2),
        ),
        "norm_topk_chosen_backward": (
            *(norms, c_TKR, x, w, norms.abs(), experts, c_TKR),
            *(slots, rows, counts),
        ),
    }


def _detached(argument: Any) -> Any:
    return argument.detach() if isinstance(argument, torch.Tensor) else argument


# On a GPU torch's own operators compute these.
ON_CPUS_ONLY = ("attention", "attention_backward", "rms_norm", "rms_norm_backward")
OPERATORS = tuple(arguments(torch.float32, "cpu"))
ON_GPUS = [name for name in OPERATORS if name not in ON_CPUS_ONLY]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("device", "name"),
    [
        *(("cpu", name) for name in OPERATORS),
        *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ON_GPUS),
    ],
)
def test_opcheck(native, device, name, dtype):
    operator = getattr(torch.ops.moe_parallel, name).default
    torch.library.opcheck(operator, arguments(dtype, device)[name])


def test_opcheck_of_optional_arguments(native, device):
    operators, given = torch.ops.moe_parallel, arguments(torch.float32, device)
    experts = torch.tensor([[0, 1], [1, -1]], device=device)
    number = experts.numel()
    for each in (
        (experts, 4, None, None),
        (experts.abs(), None, number, None),
        (experts, None, None, 5),
    ):
        torch.library.opcheck(operators.routing_map.default, (each[0], 3, *each[1:]))
    y, slots, rows, _ = given["unpermute"]
    torch.library.opcheck(operators.unpermute.default, (y, slots, rows, None))
    torch.library.opcheck(operators.swiglu.default, (*given["swiglu"][:2], None))
    x, w, k, *_ = given["norm_topk"]
    torch.library.opcheck(operators.norm_topk.default, (x, w, k, None, "nothing"))
    torch.library.opcheck(
        operators.norm_topk_backward.default,
        (given["norm_topk_backward"][0], None, *given["norm_topk_backward"][2:6], None),
    )
    of_chosen = given["norm_topk_chosen_backward"]
    torch.library.opcheck(
        operators.norm_topk_chosen_backward.default,
        (of_chosen[0], None, *of_chosen[2:6], None, *of_chosen[7:]),
    )
    main = tuple(torch.zeros(3, *sizes, device=device) for sizes in ((5, 4), (2, 5)))
    *routed, _, _ = given["routed_experts"]
    torch.library.opcheck(operators.routed_experts.default, (*routed, *main))
    x, *routing = given["autonomous_experts"][:5]
    _, *weights = given["autonomous_experts"][5:9]
    c = random_tensor(3, 2, 4, dtype=torch.float32, device=device, seed=0).requires_grad_()
    with_c = (x, *routing, None, *weights, c, *(None,) * 4, False)
    torch.library.opcheck(operators.autonomous_experts.default, with_c)
    w_down, norms = given["autonomous_experts"][5], given["unpermute"][3].detach().abs()
    with_norms = (x, *routing, w_down, *weights, c, norms, *(None,) * 3, False)
    torch.library.opcheck(operators.autonomous_experts.default, with_norms)


def test_every_operator_is_checked(native):
    operators = torch._C._dispatch_get_all_op_names()
    ours = {name.split("::")[1] for name in operators if name.startswith("moe_parallel::")}
    assert ours == set(arguments(torch.float32, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_tensors_on_two_devices_are_refused(native, device):
    x, slots, rows = arguments(torch.float32, device)["permute"]
    with pytest.raises(ValueError, match="one device"):
        torch.ops.moe_parallel.permute(x, slots.cpu(), rows)
