"""The parts of Transformer Engine that this project uses, on a CPU: operands are rounded to FP8.

The names, shapes, state and requirements are those of the real one (2.20), so that all code around
it can run without a GPU. It cannot show whether the real one does what its source says.
"""

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

_region: Any = None  # the recipe of the open region
_open: list[Any] = []  # regions, outermost first
_first = False  # no layer has computed yet in the outermost region
_layers: dict[int, Any] = {}  # layers whose maxima are applied at the end of a pass


class Format(Enum):
    """The types of the forward and the backward pass."""

    E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    HYBRID = (torch.float8_e4m3fn, torch.float8_e5m2)


class Recipe(SimpleNamespace):
    block = 16


class DelayedScaling(Recipe):
    pass


class Float8CurrentScaling(Recipe):
    pass


class Float8BlockScaling(Recipe):
    block = 128


class autocast:
    def __init__(self, *, enabled: bool, recipe: Recipe, amax_reduction_group: Any) -> None:
        assert enabled
        self.recipe, self.group = recipe, amax_reduction_group

    def __enter__(self) -> None:
        global _region, _first
        assert not _open or _open[0].recipe is self.recipe
        _first = _first if _open else True
        _open.append(self)
        _region = self

    def __exit__(self, *_: Any) -> None:
        global _region
        _open.pop()
        _region = _open[-1] if _open else None
        if not _open and torch.is_grad_enabled():
            _end_pass("scaling_fwd")


def _end_pass(direction: str) -> None:
    """Update scales and histories with a pass's maxima, all layers at once, like the real one."""
    for layer in _layers.values():
        state, region = layer.fp8_meta[direction], layer.region
        history = state.amax_history
        if dist.is_initialized() and region.group is not None and region.group.size() > 1:
            dist.all_reduce(history[0], op=dist.ReduceOp.MAX, group=region.group)
        most_recent = region.recipe.amax_compute_algo == "most_recent"
        amax = history[0].clone() if most_recent else history.amax(0)
        largest = torch.finfo(region.recipe.fp8_format.value[direction == "scaling_bwd"]).max
        scale = largest / amax / 2**region.recipe.margin
        state.scale.copy_(torch.where(amax > 0, scale, state.scale))
        history.copy_(history.roll(-1, 0))
        history[0] = 0


class GroupedLinear(torch.nn.Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        params_dtype: torch.dtype,
        device: str,
    ) -> None:
        super().__init__()
        assert not bias
        self.num_gemms, self.shape = num_gemms, (out_features, in_features)
        for i in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{i}", torch.nn.Parameter(weight))
        self.fp8_meta: dict[str, Any] = {}
        self.region: Any = None

    def init_fp8_metadata(self, num_gemms: int) -> None:
        self.region = _region
        delayed = _region is not None and isinstance(_region.recipe, DelayedScaling)
        if not delayed or self.fp8_meta:
            return
        for direction, tensors in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            self.fp8_meta[direction] = SimpleNamespace(
                scale=torch.ones(tensors * num_gemms),
                amax_history=torch.zeros(_region.recipe.amax_history_len, tensors * num_gemms),
            )

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        global _first
        self.init_fp8_metadata(self.num_gemms)
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        assert sum(m_splits) == len(x) and len(m_splits) == self.num_gemms
        assert all(w.shape == self.shape and not w.is_meta for w in weights)
        assert {x.dtype, *(w.dtype for w in weights)} == {torch.bfloat16}
        first = False
        if self.region is not None:
            block = self.region.recipe.block
            assert not any(size % block for size in (*m_splits, *self.shape)), (m_splits, block)
            if self.fp8_meta:
                _layers[id(self)] = self
                first, _first = _first, False
        return _Products.apply(x, self, m_splits, first, *weights)

    def round(self, x: torch.Tensor, direction: str, slot: int) -> torch.Tensor:
        """x rounded to FP8, returned as fp32."""
        x = x.float()
        if self.region is None:
            return x
        recipe = self.region.recipe
        kind = recipe.fp8_format.value[direction == "scaling_bwd"]
        largest, amax = torch.finfo(kind).max, x.abs().max() if x.numel() else torch.zeros(())
        if isinstance(recipe, DelayedScaling):
            state = self.fp8_meta[direction]
            state.amax_history[0, slot] = torch.maximum(state.amax_history[0, slot], amax)
            scale = state.scale[slot]
        elif isinstance(recipe, Float8BlockScaling):
            blocks = x.unflatten(-1, (-1, recipe.block)).abs().amax(-1, keepdim=True)
            scale = (largest / blocks.clamp(min=1e-12)).expand(-1, -1, recipe.block).flatten(1)
        else:
            scale = largest / amax.clamp(min=1e-12)
        return (x * scale).clamp(-largest, largest).to(kind).float() / scale


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer, sizes, first, *weights):
        pieces, y = [], []
        for i, (rows, weight) in enumerate(zip(x.split(sizes), weights, strict=True)):
            pieces += [
                layer.round(rows, "scaling_fwd", 3 * i),
                layer.round(weight, "scaling_fwd", 3 * i + 1),
            ]
            y.append(pieces[-2] @ pieces[-1].T)
        ctx.save_for_backward(*pieces)
        ctx.layer, ctx.sizes, ctx.first, ctx.region = layer, sizes, first, layer.region
        return torch.cat(y).bfloat16()

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.region = ctx.region
        pieces, dx, dw = ctx.saved_tensors, [], []
        for i, rows in enumerate(gradient.split(ctx.sizes)):
            rows = ctx.layer.round(rows, "scaling_bwd", 2 * i)
            dx.append(rows @ pieces[2 * i + 1])
            dw.append((rows.T @ pieces[2 * i]).bfloat16())
        if ctx.first:
            _end_pass("scaling_bwd")
        return torch.cat(dx).bfloat16(), None, None, None, *dw


def is_fp8_available(return_reason: bool) -> tuple[bool, str]:
    return True, ""


def is_fp8_block_scaling_available(return_reason: bool) -> tuple[bool, str]:
    return True, ""


def stand_in_modules() -> dict[str, Any]:
    """The entries of `sys.modules` while this module replaces Transformer Engine."""
    here: Any = sys.modules[__name__]
    return {
        "transformer_engine": ModuleType("transformer_engine"),
        "transformer_engine.pytorch": here,
        "transformer_engine.common": ModuleType("transformer_engine.common"),
        "transformer_engine.common.recipe": here,
    }


def forget() -> None:
    """Forget all layers."""
    _layers.clear()
