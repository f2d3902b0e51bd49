"""The one door to Transformer Engine: grouped linear layers that compute in FP8.

Shape suffixes: L experts of this rank, N rows sorted by expert, I and O the widths of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.func import functional_call

from moe_parallel.config import Fp8Config
from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional


class Fp8Engine:
    """Makes the FP8 linear layers of a model, and knows the regions in which they compute so.

    Transformer Engine ends a pass of delayed scaling where the outermost region ends: it then
    takes every layer's maxima into the histories. So with that recipe a whole forward pass is one
    region. The other recipes keep nothing between passes; for them a region is one layer, which a
    recomputation in the backward pass enters again by itself.
    """

    def __init__(self, config: Fp8Config, amax_group: dist.ProcessGroup | None) -> None:
        """
        Args:
            config: with a format.
            amax_group: ranks that hold the same expert shards: delayed scaling takes the greatest
                of their maxima, so that equal weights stay equal when rounded.

        Raises InputError: Transformer Engine is missing, or cannot compute in FP8 here.
        """
        self.config = config
        self.amax_group = amax_group
        self.te, recipes = _transformer_engine(config)
        self._recipe = _recipe(config, recipes)
        self._linears: list[GroupedLinear] = []

    def grouped_linear(self, num_experts: int, in_width: int, out_width: int) -> GroupedLinear:
        linear = GroupedLinear(self, num_experts, in_width, out_width)
        self._linears.append(linear)
        return linear

    @property
    def delayed(self) -> bool:
        return self.config.fp8_recipe == "delayed"

    def model_region(self) -> AbstractContextManager[Any]:
        """Around a forward pass of a model chunk."""
        if not self.delayed:
            return nullcontext()
        return self.region() if torch.is_grad_enabled() else self._evaluation()

    def layer_region(self) -> AbstractContextManager[Any]:
        """Around the products of one layer's experts."""
        return nullcontext() if self.delayed else self.region()

    def region(self) -> AbstractContextManager[Any]:
        region: AbstractContextManager[Any] = self.te.autocast(
            enabled=True, recipe=self._recipe, amax_reduction_group=self.amax_group
        )
        return region

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        """A region that leaves no maxima of its own to the next training pass."""
        before = {name: tensor.clone() for name, tensor in self._scaling().items()}
        with self.region():
            yield
        self.load_state(before)

    @property
    def state_facts(self) -> dict[str, int | str] | None:
        """What `state` must have been saved with to fit here; None: there is no state."""
        if not self.delayed:
            return None
        return {"recipe": "delayed", "amax_history_len": self.config.fp8_amax_history_len}

    def state(self) -> dict[str, torch.Tensor]:
        """Scales and histories of maxima of this rank, on the CPU."""
        return {name: tensor.cpu().clone() for name, tensor in self._scaling().items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self._scaling().items():
            tensor.copy_(state[name])

    def _scaling(self) -> dict[str, torch.Tensor]:
        return {
            f"{index}.{name}": tensor
            for index, linear in enumerate(self._linears)
            for name, tensor in linear.scaling().items()
        }


class GroupedLinear:
    """y = x W of each expert on its rows, in FP8 inside a region.

    Not an nn.Module: the weights belong to the experts, in the shape and order of their bf16 form,
    so that parameters, gradients, shards and checkpoints are the same in either precision.
    Transformer Engine's layer is built without storage and is lent views of them at each call.
    """

    def __init__(self, engine: Fp8Engine, num_experts: int, in_width: int, out_width: int) -> None:
        self._engine = engine
        self._num_experts = num_experts
        self._layer = engine.te.GroupedLinear(
            num_experts,
            in_width,
            out_width,
            bias=False,
            params_dtype=torch.bfloat16,
            device="meta",
        )

    def __call__(
        self, x_NI: torch.Tensor, w_LIO: torch.Tensor, rows_of_experts: list[int]
    ) -> torch.Tensor:
        """bf16 [N, O]. `rows_of_experts`: multiples of `Fp8Config.multiple` that sum to N."""
        # Transformer Engine keeps a weight as [out, in] and makes what it rounds contiguous.
        weights = {f"weight{i}": w_OI for i, w_OI in enumerate(w_LIO.mT.unbind())}
        y_NO: torch.Tensor = functional_call(self._layer, weights, (x_NI, rows_of_experts))
        return y_NO

    def scaling(self) -> dict[str, torch.Tensor]:
        """The state of delayed scaling, by name; made where no pass has made it yet."""
        with torch.no_grad(), self._engine.region():  # without gradients its end takes no maxima
            self._layer.init_fp8_metadata(num_gemms=self._num_experts)
        return {
            f"{direction}.{name}": getattr(self._layer.fp8_meta[direction], name)
            for direction in ("scaling_fwd", "scaling_bwd")
            for name in ("scale", "amax_history")
        }


def _transformer_engine(config: Fp8Config) -> tuple[Any, Any]:
    """Its modules of layers and of recipes."""
    flag = f"--fp8-format {config.fp8_format}"
    engine = import_optional("transformer_engine.pytorch", flag)
    recipes = import_optional("transformer_engine.common.recipe", flag)
    try:
        if config.fp8_recipe == "blockwise":
            able, reason = engine.is_fp8_block_scaling_available(return_reason=True)
        else:
            able, reason = engine.is_fp8_available(return_reason=True)
    except (RuntimeError, AssertionError) as error:  # no GPU to ask
        able, reason = False, str(error)
    if not able:
        raise InputError(
            f"--fp8-format {config.fp8_format} --fp8-recipe {config.fp8_recipe} cannot be computed "
            f"here ({' '.join(reason.split())}): use a GPU that can, or leave --fp8-format out"
        )
    return engine, recipes


def _recipe(config: Fp8Config, recipes: Any) -> Any:
    assert config.fp8_format is not None
    number_format = recipes.Format[config.fp8_format.upper()]
    if config.fp8_recipe == "tensorwise":
        return recipes.Float8CurrentScaling(fp8_format=number_format)
    if config.fp8_recipe == "blockwise":
        return recipes.Float8BlockScaling(fp8_format=number_format)
    return recipes.DelayedScaling(
        fp8_format=number_format,
        margin=config.fp8_margin,
        amax_history_len=config.fp8_amax_history_len,
        amax_compute_algo=config.fp8_amax_compute_algo,
    )
