"""What torch.library promises of an operator: schema, gradient registration, fake, tracing."""

import pytest
import torch

from tests.ops.cases import random_tensor

DTYPES = [torch.float32, torch.bfloat16]


def arguments(dtype: torch.dtype, device: str) -> dict[str, tuple]:
    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return random_tensor(*shape, dtype=dtype, device=device, seed=0).requires_grad_()

    slots = torch.tensor([0, 3, -1, 5, 2, -1], device=device)
    rows = torch.tensor([[0, -1], [4, 1], [-1, 3]], device=device)
    counts = torch.tensor([3, 0, 3])
    gates, norms = tensor(3, 2, dtype=torch.float32), tensor(3, 4, dtype=torch.float32)
    return {
        "routing_map": (rows.clamp(max=3), 4, None),
        "permute": (tensor(3, 5), slots, rows),
        "unpermute": (tensor(6, 5), slots, rows, gates),
        "unpermute_backward": (
            tensor(3, 5).detach(),
            tensor(6, 5).detach(),
            slots,
            rows,
            gates.detach(),
        ),
        "grouped_gemm": (tensor(6, 5), tensor(3, 5, 2), counts),
        "grouped_outer": (tensor(6, 5), tensor(6, 2), counts),
        "norm_topk": (tensor(3, 5), tensor(4, 5, 2), 2),
        "norm_topk_backward": (
            norms.detach(),
            tensor(3, 5).detach(),
            tensor(4, 5, 2).detach(),
            norms.detach().abs(),
        ),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", arguments(torch.float32, "cpu"))
def test_opcheck(native, device, name, dtype):
    operator = getattr(torch.ops.moe_parallel, name).default
    torch.library.opcheck(operator, arguments(dtype, device)[name])


def test_opcheck_of_optional_arguments(native, device):
    experts = torch.tensor([[0, 1], [1, -1]], device=device)
    torch.library.opcheck(torch.ops.moe_parallel.routing_map.default, (experts, 3, 4))
    y, slots, rows, _ = arguments(torch.float32, device)["unpermute"]
    torch.library.opcheck(torch.ops.moe_parallel.unpermute.default, (y, slots, rows, None))


def test_every_operator_is_checked(native):
    operators = torch._C._dispatch_get_all_op_names()
    ours = {name.split("::")[1] for name in operators if name.startswith("moe_parallel::")}
    assert ours == set(arguments(torch.float32, "cpu"))


def test_an_integer_tensor_is_refused(native, device):
    slots, rows = torch.tensor([0], device=device), torch.tensor([[0]], device=device)
    with pytest.raises(TypeError, match="x must be float32, float64 or bfloat16, not Int"):
        torch.ops.moe_parallel.permute(slots.int().view(1, 1), slots, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_tensors_on_two_devices_are_refused(native, device):
    x, slots, rows = arguments(torch.float32, device)["permute"]
    with pytest.raises(ValueError, match="one device"):
        torch.ops.moe_parallel.permute(x, slots.cpu(), rows)
