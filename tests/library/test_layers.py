"""AoE and RoutedMoE behave like any torch module."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch._dynamo.testing import CompileCounterWithBackend

from moe_parallel import AoE, RoutedMoE
from moe_parallel.systems import TopKSelection
from tests.library.small import KINDS, small


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_no_process_group(kind: str) -> None:
    moe = small(kind)
    (moe(torch.randn(6, 16)).sum() + moe.aux_loss).backward()
    assert all(weight.grad is not None for weight in moe.parameters())
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 5, 16), (10, 16), (16,), (2, 3, 5, 16), (0, 16), (2, 0, 16)])
def test_shapes(kind: str, shape: tuple[int, ...]) -> None:
    moe, x = small(kind), torch.randn(shape)
    y = moe(x)
    assert y.shape == x.shape and y.dtype == x.dtype
    torch.testing.assert_close(y, moe(x.reshape(-1, 16)).view(shape), rtol=1e-5, atol=1e-8)
    assert moe.aux_loss.shape == () and moe.aux_loss.isfinite()


def test_sequences_are_the_last_axis_but_one() -> None:
    """The loss of sequences is the mean of the losses of each, whatever axes precede them."""
    selection = TopKSelection(moe_router_load_balancing_type="seq_aux_loss")
    torch.manual_seed(0)
    moe = RoutedMoE(16, 4, selection=selection, ffn_hidden_size=24)
    x = torch.randn(2, 3, 5, 16)
    moe(x)
    together, single = moe.aux_loss.item(), []
    for sequence in x.flatten(0, 1):
        moe(sequence)
        single.append(moe.aux_loss.item())
    assert together == pytest.approx(sum(single) / 6, rel=1e-6)
    assert max(single) - min(single) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_initial_weights(kind: str) -> None:
    torch.manual_seed(0)
    options = {"ffn_hidden_size": 256, "init_method_std": 0.03}
    moe = AoE(128, 8, **options) if kind == "aoe" else RoutedMoE(128, 8, **options)
    for name, weight in moe.named_parameters():
        assert weight.mean().item() == pytest.approx(0, abs=3e-3), name
        std = 64**-0.5 if "w_up" in name else 0.03  # so that x W_down W_up is as large as x W_g
        assert weight.std().item() == pytest.approx(std, rel=0.06), name
    before = [weight.clone() for weight in moe.parameters()]
    torch.manual_seed(0)
    moe.reset_parameters()
    assert all(map(torch.equal, before, moe.parameters()))
    moe.reset_parameters()
    assert not any(map(torch.equal, before, moe.parameters()))


def test_built_on_a_device_and_in_a_type() -> None:
    moe = small(device="meta", dtype=torch.bfloat16)
    assert {(w.device.type, w.dtype) for w in moe.parameters()} == {("meta", torch.bfloat16)}
    torch.manual_seed(0)
    moe.to_empty(device="cpu").reset_parameters()
    assert moe(torch.randn(3, 16, dtype=torch.bfloat16)).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_auxiliary_loss_is_of_the_latest_forward_pass(kind: str) -> None:
    moe, x = small(kind, aux_loss_coeff=0.5), torch.randn(64, 16)
    assert moe.aux_loss == 0
    moe(x)
    assert moe.aux_loss.requires_grad and 0.9 < moe.aux_loss < 1.5  # 1 if the load is even
    moe.eval()
    moe(x)
    assert moe.aux_loss == 0
    moe.train()
    with torch.no_grad():
        moe(x)
    assert moe.aux_loss == 0 and not moe.aux_loss.requires_grad
    free = small(kind, aux_loss_coeff=0.0)
    free(x)
    assert free.aux_loss == 0


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_whole_and_apart(kind: str) -> None:
    moe, x = small(kind, expert_bias=True), torch.randn(9, 16)
    moe(x)
    buffer = io.BytesIO()
    torch.save(moe, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(moe), torch.load(buffer, weights_only=False)):
        torch.testing.assert_close(copied(x), moe(x), rtol=0, atol=0)
        assert copied.aux_loss.requires_grad and copied.aux_loss == moe.aux_loss
        bias = moe.layer.bias.bias_E.clone()
        copied.after_step()
        assert not torch.equal(copied.layer.bias.bias_E, bias)
        assert torch.equal(moe.layer.bias.bias_E, bias)


def test_a_bias_moves_with_the_layer_and_balances() -> None:
    moe = small(expert_bias=True, aux_loss_coeff=0.0, init_method_std=0.2).bfloat16()
    assert moe.layer.bias.bias_E.dtype == torch.float32
    x = torch.randn(256, 16, dtype=torch.bfloat16)
    spread = []
    for _ in range(100):
        moe(x)
        spread.append(moe.layer.load.counts[:-1].amax() - moe.layer.load.counts[:-1].amin())
        moe.after_step()
    assert max(spread[-10:]) < 0.5 * spread[0]
    # Another tensor, as after a move to a GPU: the layer ranks with that tensor.
    moe.layer.bias._buffers["bias_E"] = torch.tensor([9.0, 9.0, 0.0, 0.0])
    moe(x)
    assert moe.layer.load.counts.tolist() == [256, 256, 0, 0, 256]


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind: str) -> None:
    """Weights remain in fp32, and outputs are within the rounding of bf16's 8 bits."""
    moe = small(kind, init_method_std=0.3)
    x = torch.randn(32, 16, requires_grad=True)
    y = moe(x)
    weight = moe.layer.experts.w_out_LWD if kind == "aoe" else moe.layer.experts.w_out_LFD
    (gradient,) = torch.autograd.grad(y.sum(), weight)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = moe(x)
    assert rounded.dtype == torch.bfloat16 and moe.aux_loss.dtype == torch.float32
    (rounded.float().sum() + moe.aux_loss).backward()
    assert weight.grad.dtype == x.grad.dtype == torch.float32
    different = (rounded.float() - y).abs().amax(dim=1) > 0.05 * y.abs().max()
    assert different.sum() <= 1  # close norms may be ranked differently
    assert (weight.grad - gradient).norm() < 0.2 * gradient.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_whole(kind: str) -> None:
    """One graph for all steps, and exactly the eager numbers. The backend generates no code: that
    is slow."""
    moe, x = small(kind), torch.randn(2, 5, 16)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moe, backend=backend, fullgraph=True)

    def step(forward: Any) -> list[torch.Tensor]:
        moe.zero_grad()
        y = forward(x)
        (y.square().mean() + moe.aux_loss).backward()
        return [y, moe.aux_loss, *(weight.grad for weight in moe.parameters())]

    for _ in range(3):
        for got, expected in zip(step(compiled), step(moe), strict=True):
            assert torch.equal(got, expected)
        moe.after_step()
    assert backend.frame_count == 1


@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing(kind: str) -> None:
    moe, x = small(kind), torch.randn(9, 16, requires_grad=True)
    plain = moe(x)
    (plain.sum() + moe.aux_loss).backward()
    expected = [weight.grad.clone() for weight in moe.parameters()]
    moe.zero_grad()
    y = torch.utils.checkpoint.checkpoint(moe, x, use_reentrant=False)
    (y.sum() + moe.aux_loss).backward()
    for weight, gradient in zip(moe.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_moved_to_a_gpu(kind: str) -> None:
    moe, x = small(kind, expert_bias=True), torch.randn(33, 16)
    y = moe(x)
    moe.cuda()
    on_gpu = moe(x.cuda())
    torch.testing.assert_close(on_gpu.cpu(), y, rtol=1e-4, atol=1e-6)
    (on_gpu.sum() + moe.aux_loss).backward()
    moe.after_step()
    assert moe.layer.bias.bias_E.is_cuda and moe.layer.bias.bias_E.abs().max() > 0
    with torch.autocast("cuda", torch.bfloat16):
        assert moe(x.cuda()).dtype == torch.bfloat16
