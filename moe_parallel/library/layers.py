"""MoE layers as torch modules. Each contains a layer of training and runs on one process.

Shape suffixes: S sequence, B batch (Megatron's order), D model width.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from moe_parallel.balancing.controller import end_step
from moe_parallel.config import AutonomousSelection, RoutedSelection, Selection
from moe_parallel.errors import InputError
from moe_parallel.layers import DispatchedLayer, LayerConfig
from moe_parallel.layers.dispatched import build_context
from moe_parallel.layers.system import system_of
from moe_parallel.library.arguments import layer_config, options_of_layer
from moe_parallel.parallel import groups_of_one
from moe_parallel.systems import AoESelection, TopKSelection
from moe_parallel.telemetry.statistics import RoutingTotals

#: Beginnings of the names of weights that layers use in fp32, whatever their dtype.
_USED_IN_FP32 = ("w_router_", "w_constant_", "shared.w_gate_", "b_E")


class LayerTotals:
    """Receives the statistics of a single layer."""

    def __init__(self) -> None:
        self.totals: RoutingTotals | None = None  # None: nothing is recorded

    def recipient(self) -> RoutingTotals | None:
        return self.totals


class MixtureOfExperts(nn.Module):
    """A layer of training, `layer`, as a self-contained module. See AoE and RoutedMoE.

    Attributes:
        aux_loss: fp32 [], the weighted sum of the auxiliary losses of the latest forward pass, to
            be added to the loss of the model. It is 0 in evaluation mode, under torch.no_grad(),
            and if all coefficients are 0.
        config: the training configuration of the layer.
    """

    SYSTEMS: ClassVar[type[Selection]]  # the common base class of the systems that it accepts
    DEFAULT: ClassVar[type[Selection]]
    aux_loss: torch.Tensor
    layer: DispatchedLayer

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        selection: Selection | None,
        shortcuts: dict[str, Any],
        others: dict[str, Any],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        kinds = type(self).__name__, self.DEFAULT, self.SYSTEMS
        options = options_of_layer(*kinds, selection, shortcuts)
        sizes = {"hidden_size": hidden_size, "num_experts": num_experts}
        self.config = layer_config(sizes, options | others)
        self.hidden_size, self.num_experts = hidden_size, num_experts
        self.statistics = LayerTotals()
        self._steps = 0
        self.aux_loss = torch.zeros(())
        self._by_sequence = self.config.selection.by_sequence
        with nullcontext() if device is None else torch.device(device):
            self.layer = self._build()
        self._init_std = {n: getattr(w, "init_std", None) for n, w in self.layer.named_parameters()}
        self.reset_parameters()
        self.to(dtype or torch.get_default_dtype())

    def _build(self) -> DispatchedLayer:
        config = self.config
        context = build_context(
            config,
            groups_of_one(),
            self.statistics,
            add_loss=self._set_aux_loss,
            iteration=self._iteration,
            seed=0,
            train_iters=None,
        )
        selection = config.selection.rescaled(config)
        sizes = self.hidden_size, self.num_experts, config.model.init_method_std
        layer = system_of(config.selection).build(
            LayerConfig(*sizes), selection, config.expert_width, context
        )
        assert isinstance(layer, DispatchedLayer)
        layer.set_layer_number(1)
        return layer

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw initial weights from torch's generator: N(0, init_method_std^2). Vectors are 1,
        except the bias of `RoutingFreeSelection`, which is 0."""
        for name, weight in self.layer.named_parameters():
            std = self._init_std[name]
            if weight.dim() == 1 and std is None:
                weight.fill_(1.0)
                continue
            weight.normal_(std=self.config.model.init_method_std if std is None else std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]. With more than two axes, the second to last is the sequence.

        Under autocast the layer computes in autocast's dtype, and routers compute in fp32.

        Raises InputError for an input whose width or dtype differs from that of the weights.
        """
        self._check(x)
        self.aux_loss = torch.zeros((), device=x.device)
        if not torch.is_autocast_enabled(x.device.type):
            return self._compute(x, {})
        dtype = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            weights = {
                name: weight.to(dtype)
                for name, weight in self.layer.named_parameters()
                if not name.startswith(_USED_IN_FP32)
            }
            return self._compute(x.to(dtype), weights)

    def _compute(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """The output with `weights`, by name, instead of the layer's own."""
        if x.numel() == 0:
            # Every weight has a gradient, 0: under DDP the other ranks wait for all of them.
            y = x + sum(weight.sum() for weight in self.layer.parameters())
            self.aux_loss = y.sum(dtype=torch.float32)
            return y
        split = self._by_sequence and x.dim() > 2
        length = x.shape[-2] if split else x.numel() // self.hidden_size
        hidden_SBD = x.reshape(-1, length, self.hidden_size).transpose(0, 1)
        y_SBD, _ = functional_call(self.layer, weights, (hidden_SBD,))
        return y_SBD.transpose(0, 1).reshape(x.shape)

    def _set_aux_loss(self, x_TD: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        self.aux_loss = loss
        return x_TD

    def after_step(self, group: dist.ProcessGroup | None = None) -> None:
        """Move the balancing bias and the controller by the loads since the last call.

        Call it after each optimizer step. It changes something only with a balancing bias, cutoffs,
        a controller, `global_aux_loss`, the coupling loss or forced experts.

        Args:
            group: processes that train copies of this layer; the loads are summed over them.
                None: only this process. Collective.
        """
        self._steps += 1
        group = groups_of_one().tp_dp_cp if group is None else group
        self.layer.balance(group)
        if self.layer.controller is not None:
            end_step([self.layer.controller], self.layer.controller.state.device, group)

    def _iteration(self) -> int:
        """The number of steps so far."""
        return self._steps

    def _check(self, x: torch.Tensor) -> None:
        if x.dim() == 0 or x.shape[-1] != self.hidden_size:
            raise InputError(
                f"x is of shape {list(x.shape)}: its last axis must be hidden_size, "
                f"{self.hidden_size}"
            )
        weight = next(self.layer.experts.parameters())
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise InputError(
                f"x is {x.dtype} and the weights are {weight.dtype}: convert one of them, or "
                "compute under torch.autocast"
            )

    def extra_repr(self) -> str:
        selection, config = self.config.selection, self.config
        return (
            f"hidden_size={self.hidden_size}, num_experts={self.num_experts}, "
            f"expert_width={config.expert_width}, selection={type(selection).__name__}"
        )

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles. The latest loss loses its graph, which cannot be
        copied."""
        return self.__dict__ | {"aux_loss": self.aux_loss.detach()}


class AoE(MixtureOfExperts):
    """Autonomy-of-Experts: experts E_i(x) = (SiLU(x W_down W_up) * (x W_p)) W_o without a router.

    The `top_k` experts with the largest ||x W_down^i|| compute a token. The weights are under
    `layer`: w_down_EDR [E, D, R], experts.w_up_LRW [E, R, W], w_p_LDW [E, D, W], w_out_LWD
    [E, W, D].
    """

    SYSTEMS, DEFAULT = AutonomousSelection, AoESelection

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int | None = None,
        low_rank_size: int | None = None,
        wide_size: int | None = None,
        *,
        ffn_hidden_size: int | None = None,
        up_init_method: str | None = None,
        aux_loss_coeff: float | None = None,
        expert_bias: bool | None = None,
        selection: AutonomousSelection | None = None,
        capacity_factor: float | None = None,
        init_method_std: float | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            hidden_size: D.
            num_experts: E.
            top_k: experts per token; 2.
            low_rank_size: R (d_low), the rank of W_g = W_down W_up; 64.
            wide_size: W (d_wide), the width of an expert; by default an expert has as many
                parameters as a SwiGLU expert of ffn_hidden_size (Eq. 5 of the AoE paper).
            ffn_hidden_size: the width of the SwiGLU expert that sets wide_size; 4 * hidden_size.
            up_init_method: initial W_up: "scaled", N(0, 1 / R), so that x W_down W_up starts as
                large as x W_g would, or "normal", like all weights; scaled.
            aux_loss_coeff: weight of the load-balancing loss in aux_loss; 0.01.
            expert_bias: balance the load by a bias that `after_step` moves; False.
            selection: instead of the arguments above, an AoESelection, AoETopPSelection,
                AoEThresholdSelection, RoutingFreeSelection or AoEExpertChoiceSelection of
                moe_parallel.config, with all its options.
            capacity_factor: an expert accepts at most ceil(tokens * K / E * factor) of the tokens
                of a forward pass; None: dropless.
            init_method_std: standard deviation of initial weights; 0.02.
            backend: "native" (C++ and CUDA), "reference" (plain torch) or "auto", which is native
                if it is built.
            device, dtype: those of the weights; torch's defaults.

        Raises InputError, a ValueError whose message is one line.
        """
        if selection is None and up_init_method is None:
            up_init_method = "scaled"
        shortcuts = {
            "up_init_method": up_init_method,
            "top_k": top_k,
            "low_rank_size": low_rank_size,
            "wide_size": wide_size,
            "aux_loss_coeff": aux_loss_coeff,
            "expert_bias": expert_bias,
        }
        others = {
            "ffn_hidden_size": ffn_hidden_size,
            "capacity_factor": capacity_factor,
            "init_method_std": init_method_std,
            "backend": backend,
        }
        super().__init__(hidden_size, num_experts, selection, shortcuts, others, device, dtype)


class RoutedMoE(MixtureOfExperts):
    """A linear router over SwiGLU experts E_i(x) = (SiLU(x W_g) * (x W_p)) W_o.

    The `top_k` experts with the largest router logits compute a token. The weights are under
    `layer`: w_router_ED [E, D], experts.w_gate_up_LD2F [E, D, 2, F] (W_g, W_p), experts.w_out_LFD
    [E, F, D].
    """

    SYSTEMS, DEFAULT = RoutedSelection, TopKSelection

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int | None = None,
        *,
        ffn_hidden_size: int | None = None,
        aux_loss_coeff: float | None = None,
        expert_bias: bool | None = None,
        selection: RoutedSelection | None = None,
        capacity_factor: float | None = None,
        init_method_std: float | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            ffn_hidden_size: F, the width of an expert; 4 * hidden_size.
            selection: instead of top_k, aux_loss_coeff and expert_bias, a TopKSelection,
                TopPSelection, ReLUSelection, ThresholdSelection, ExpertChoiceSelection or
                SegmentExpertChoiceSelection of moe_parallel.config, with all its options.

        The other arguments are those of AoE.

        Raises InputError, a ValueError whose message is one line.
        """
        shortcuts = {"top_k": top_k, "aux_loss_coeff": aux_loss_coeff, "expert_bias": expert_bias}
        others = {
            "ffn_hidden_size": ffn_hidden_size,
            "capacity_factor": capacity_factor,
            "init_method_std": init_method_std,
            "backend": backend,
        }
        super().__init__(hidden_size, num_experts, selection, shortcuts, others, device, dtype)
