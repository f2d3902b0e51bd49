"""Experts with their products in FP8, by Transformer Engine; the weights are the same.

    permute, padding each expert's rows -> linear -> SwiGLU with the probs -> linear -> unpermute

Linear layers take and return bf16 and compute in FP8. The operators compute everything else in
bf16, including C = x W_down, by which experts are ranked.

Shape suffixes: L experts of this rank, N rows sorted by expert, I and O the widths of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.func import functional_call

from moe_parallel.config import Fp8Config
from moe_parallel.dispatch.dispatched import probs_of_rows, rows_of_choices
from moe_parallel.errors import InputError
from moe_parallel.experts.experts import LowRankExperts, Matrices, SwiGLUExperts
from moe_parallel.ops import RowMap
from moe_parallel.ops.aligned_rows import aligned_rows
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


def swiglu_experts(fp8: Fp8Engine | None) -> Callable[..., SwiGLUExperts]:
    """The class or function that builds SwiGLU experts; in FP8 if `fp8` is given."""
    return SwiGLUExperts if fp8 is None else partial(Fp8SwiGLUExperts, fp8)


def low_rank_experts(fp8: Fp8Engine | None) -> Callable[..., LowRankExperts]:
    """The class or function that builds AoE's experts; in FP8 if `fp8` is given."""
    return LowRankExperts if fp8 is None else partial(Fp8LowRankExperts, fp8)


class Fp8SwiGLUExperts(SwiGLUExperts):
    """E_i(x) = (SiLU(x W_g) * (x W_p)) W_o with all three products in FP8."""

    def __init__(self, fp8: Fp8Engine, *arguments: Any) -> None:
        """`arguments`: those of SwiGLUExperts."""
        super().__init__(*arguments)
        self.fp8 = fp8
        experts, d, two, f = self.w_gate_up_LD2F.shape
        self._gate_up = fp8.grouped_linear(experts, d, two * f)
        self._out = fp8.grouped_linear(experts, f, d)

    def forward(
        self,
        x_MD: torch.Tensor,
        probs_MJ: torch.Tensor,
        row_map: RowMap,
        of_part: Matrices | None = None,
    ) -> torch.Tensor:
        assert of_part is None  # one FP8 layer holds the scales of all experts
        row_map, rows_L = aligned_rows(row_map, self.fp8.config.multiple)
        x_ND = self.ops.permute(x_MD, row_map)
        probs_N = probs_of_rows(probs_MJ, row_map)
        with self.fp8.layer_region():
            gate_up_N2F = self._gate_up(x_ND, self.w_gate_up_LD2F.flatten(2), rows_L)
            gate_NF, up_NF = gate_up_N2F.chunk(2, dim=1)
            h_NF = self.ops.swiglu(gate_NF, up_NF, probs_N)
            y_ND = self._out(h_NF, self.w_out_LFD, rows_L)
        return self.ops.unpermute(y_ND, row_map)


class Fp8LowRankExperts(LowRankExperts):
    """E_i(x) = (SiLU(C W_up) * (x W_p)) W_o with these three products in FP8, but not C = x W_down.

    C W_up is kept for the backward pass; `recompute_gate` has no effect.
    """

    def __init__(self, fp8: Fp8Engine, *arguments: Any, **options: Any) -> None:
        """`arguments`, `options`: those of LowRankExperts."""
        super().__init__(*arguments, **options)
        self.fp8 = fp8
        experts, r, w = self.w_up_LRW.shape
        d = self.w_p_LDW.size(1)
        self._up = fp8.grouped_linear(experts, r, w)
        self._p = fp8.grouped_linear(experts, d, w)
        self._out = fp8.grouped_linear(experts, w, d)

    def forward(
        self,
        x_MD: torch.Tensor,
        probs_MJ: torch.Tensor,
        row_map: RowMap,
        w_down_LDR: torch.Tensor,
        c_MJR: torch.Tensor | None = None,
        norms_MJ: torch.Tensor | None = None,
        of_part: Matrices | None = None,
    ) -> torch.Tensor:
        assert of_part is None  # one FP8 layer holds the scales of all experts
        assert norms_MJ is None  # AutonomousLayer differentiates the norms itself
        row_map, rows_L = aligned_rows(row_map, self.fp8.config.multiple)
        x_ND = self.ops.permute(x_MD, row_map)
        probs_N = probs_of_rows(probs_MJ, row_map)
        if c_MJR is None:
            c_NR = self.ops.grouped_gemm(x_ND, w_down_LDR, row_map.counts_E)
        else:
            c_NR = self.ops.permute(c_MJR.flatten(0, 1), rows_of_choices(row_map))
        with self.fp8.layer_region():
            g_NW = self._up(c_NR, self.w_up_LRW, rows_L)
            h_NW = self.ops.swiglu(g_NW, self._p(x_ND, self.w_p_LDW, rows_L), probs_N)
            y_ND = self._out(h_NW, self.w_out_LWD, rows_L)
        return self.ops.unpermute(y_ND, row_map)
