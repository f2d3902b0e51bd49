"""What replaces Megatron-Core's loops over gradients, on tensors of the CPU."""

from collections.abc import Iterator

import pytest
import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads, optimizer

from moe_parallel.platform.clipping import l2_norm_by_rows, l2_norm_of_list, scale_list
from moe_parallel.platform.cpu_host import adapt_megatron_to_cpu
from moe_parallel.platform.gradient_loops import replace_gradient_loops

UNUSED = (2**16, torch.zeros(1, dtype=torch.int))


@pytest.fixture(autouse=True)
def megatron_as_it_was() -> Iterator[None]:
    before = [(m, m.multi_tensor_scale_impl) for m in (clip_grads, optimizer)]
    norm = clip_grads.l2_norm_impl
    yield
    clip_grads.l2_norm_impl = norm
    for module, scale in before:
        module.multi_tensor_scale_impl = scale


def tensors(*dtypes: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(3, 4), (5,), (1,), (0,)]
    return [torch.randn(size, generator=generator).to(dtype) for dtype in dtypes for size in sizes]


def test_the_norm_by_hand():
    lists = [[torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])], [torch.tensor([12.0])]]
    norm, _ = l2_norm_of_list(*UNUSED, lists, False)
    assert norm.shape == (1,) and norm.dtype == torch.float32 and norm.item() == 13.0


def test_the_norm_is_that_of_all_numbers():
    own = tensors(torch.float32)
    norm, _ = l2_norm_of_list(*UNUSED, [own], False)
    assert norm.item() == pytest.approx(torch.cat([t.flatten() for t in own]).norm().item())


@pytest.mark.parametrize("scale", [1.0, 0.25, -3.0])
def test_scaling_to_others_and_in_place(scale):
    sources, targets = tensors(torch.float32), tensors(torch.bfloat16)
    given = [tensor.clone() for tensor in sources]
    scale_list(*UNUSED, [sources, targets], scale)
    for source, target, before in zip(sources, targets, given, strict=True):
        assert torch.equal(source, before)
        torch.testing.assert_close(target, (scale * source.bfloat16()), rtol=0, atol=0)
    scale_list(*UNUSED, [sources, sources], scale)
    for source, before in zip(sources, given, strict=True):
        assert torch.equal(source, scale * before)
    scale_list(*UNUSED, [[], []], scale)


def test_only_the_loops_are_replaced():
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    optimizer.multi_tensor_scale_impl = of_a_package = object()
    for _ in range(2):
        replace_gradient_loops()
        assert clip_grads.l2_norm_impl is l2_norm_of_list
        assert clip_grads.multi_tensor_scale_impl is scale_list
        assert optimizer.multi_tensor_scale_impl is of_a_package


@pytest.mark.skipif(torch.cuda.is_available(), reason="the host has a GPU")
def test_a_cpu_host_scales_in_place_and_keeps_its_norm():
    adapt_megatron_to_cpu()
    assert clip_grads.multi_tensor_scale_impl is optimizer.multi_tensor_scale_impl is scale_list
    assert clip_grads.l2_norm_impl is l2_norm_by_rows
