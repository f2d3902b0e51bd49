"""Grouped linear layers that compute in FP8, by Transformer Engine.

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
    """Builds the FP8 linear layers of a model, and the regions in which they compute in FP8.

    With delayed scaling, Transformer Engine ends a pass at the end of the outermost region, and
    then adds every layer's maxima to the histories. So with that recipe a complete forward pass is
    one region. The other recipes keep nothing between passes. For them a region is one layer, and
    recomputation in the backward pass enters it again.
    """

    def __init__(self, config: Fp8Config, amax_group: dist.ProcessGroup | None) -> None:
        """
        Args:
            config: its format is not None.
            amax_group: the ranks that hold the same expert shards. Delayed scaling takes the
                largest of their maxima, so that equal weights are rounded equally.

        Raises InputError if Transformer Engine is missing or cannot compute in FP8 here.
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
        """The region around a forward pass of a model chunk."""
        if not self.delayed:
            return nullcontext()
        return self.region() if torch.is_grad_enabled() else self._evaluation()

    def layer_region(self) -> AbstractContextManager[Any]:
        """The region around the products of one layer's experts."""
        return nullcontext() if self.delayed else self.region()

    def region(self) -> AbstractContextManager[Any]:
        region: AbstractContextManager[Any] = self.te.autocast(
            enabled=True, recipe=self._recipe, amax_reduction_group=self.amax_group
        )
        return region

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        """A region whose maxima do not affect the next training pass."""
        before = {name: tensor.clone() for name, tensor in self._scaling().items()}
        with self.region():
            yield
        self.load_state(before)

    @property
    def state_facts(self) -> dict[str, int | str] | None:
        """The options with which a `state` must have been saved to fit; None: there is no state."""
        if not self.delayed:
            return None
        return {"recipe": "delayed", "amax_history_len": self.config.fp8_amax_history_len}

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's scales and histories of maxima, on the CPU."""
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

    It is not an nn.Module. The weights belong to the experts and have the same shape and order as
    in bf16, so that parameters, gradients, shards and checkpoints do not depend on the precision.
    Transformer Engine's layer is built without storage and gets views of the weights in each call.
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
        # Transformer Engine takes a weight as [out, in], and makes it contiguous when rounding.
        weights = {f"weight{i}": w_OI for i, w_OI in enumerate(w_LIO.mT.unbind())}
        y_NO: torch.Tensor = functional_call(self._layer, weights, (x_NI, rows_of_experts))
        return y_NO

    def scaling(self) -> dict[str, torch.Tensor]:
        """The state of delayed scaling, by name; created if no pass has created it yet."""
        with torch.no_grad(), self._engine.region():  # without gradients it records no maxima
            self._layer.init_fp8_metadata(num_gemms=self._num_experts)
        return {
            f"{direction}.{name}": getattr(self._layer.fp8_meta[direction], name)
            for direction in ("scaling_fwd", "scaling_bwd")
            for name in ("scale", "amax_history")
        }


def _transformer_engine(config: Fp8Config) -> tuple[Any, Any]:
    """Transformer Engine's modules of layers and of recipes."""
    flag = f"--fp8-format {config.fp8_format}"
    engine = import_optional("transformer_engine.pytorch", flag)
    recipes = import_optional("transformer_engine.common.recipe", flag)
    try:
        if config.fp8_recipe == "blockwise":
            able, reason = engine.is_fp8_block_scaling_available(return_reason=True)
        else:
            able, reason = engine.is_fp8_available(return_reason=True)
    except (RuntimeError, AssertionError) as error:  # there is no GPU
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
