"""Shared experts: a dense SwiGLU layer that computes every token in addition to its experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moe_parallel.experts.experts import ShardedModule
from moe_parallel.ops import Ops
from moe_parallel.ops.fp32_linear import fp32_dot
from moe_parallel.parallel import Groups, OneProcess


class SharedExpert(ShardedModule):
    """The sum of E_s(x) over the shared experts, times 1 or sigmoid(x w) (Qwen2-MoE).

    m shared experts of width f are one dense layer of width m f, which is split over the
    tensor-parallel ranks like any other. So it takes the tokens as the MoE layer receives them.
    Shape suffixes: S sequence, B batch, D model width.
    """

    w_gate_1D: torch.Tensor | None

    def __init__(
        self,
        config: Any,
        width: int,
        weighed: bool,
        groups: Groups,
        ops: Ops,
        recomputes: bool = False,
    ) -> None:
        """
        Args:
            config: the configuration of the layer.
            width: the total inner width of all shared experts; tp divides it.
            weighed: multiply the output by sigmoid(x w).
            groups: the process groups.
            ops: the operators.
            recomputes: keep only the input for the backward pass.
        """
        super().__init__()
        if isinstance(groups.tp, OneProcess):
            self.dense: nn.Module = WholeDense(config, width, ops)
        else:
            from moe_parallel.experts.dense import split_dense

            self.dense = split_dense(config, width, ops, groups.tp)
        self.recomputes = recomputes
        if weighed:
            weight = nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
            weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            self.register_parameter("w_gate_1D", weight)
        else:
            self.w_gate_1D = None

    def forward(self, hidden_SBD: torch.Tensor) -> torch.Tensor:
        """[S, B, D] -> [S, B, D]; with sequence parallelism, S is this rank's share."""
        if self.recomputes and torch.is_grad_enabled():
            from megatron.core.tensor_parallel import checkpoint

            y_SBD: torch.Tensor = checkpoint(self._output, False, hidden_SBD)
            return y_SBD
        # As with recomputation, the expert's gradients of its input are added to each other first,
        # and then to those of the other experts: the same bits.
        return self._output(hidden_SBD.view_as(hidden_SBD))

    def _output(self, hidden_SBD: torch.Tensor) -> torch.Tensor:
        y_SBD, _ = self.dense(hidden_SBD)
        if self.w_gate_1D is None:
            return y_SBD
        logits_SB1 = fp32_dot(hidden_SBD, self.w_gate_1D)
        return y_SBD * torch.sigmoid(logits_SB1).to(y_SBD.dtype)

    def begin(self, hidden_SBD: torch.Tensor) -> torch.Tensor:
        """Starts the computation, before the tokens are dispatched. Returns input for `finish`."""
        return self(hidden_SBD)

    def finish(self, y_SBD: torch.Tensor) -> torch.Tensor:
        """The result of `begin`, ready to be added to the output of the experts."""
        return y_SBD


class WholeDense(nn.Module):
    """DenseMLP of one process, without Megatron-Core; the weights have the same names."""

    def __init__(self, config: Any, width: int, ops: Ops) -> None:
        super().__init__()
        d, dtype = config.hidden_size, config.params_dtype
        self.linear_fc1 = WholeLinear(d, 2 * width, dtype)
        self.linear_fc2 = WholeLinear(width, d, dtype)
        self.ops = ops

    def forward(self, hidden_SBD: torch.Tensor) -> tuple[torch.Tensor, None]:
        h_NF = self.ops.swiglu_halves(self.linear_fc1(hidden_SBD).flatten(0, 1))
        return self.linear_fc2(h_NF).view_as(hidden_SBD), None


class WholeLinear(nn.Module):
    """y = x W^T without initial values, which the owner of the layer draws."""

    def __init__(self, input_size: int, output_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class OverlappedSharedExpert(SharedExpert):
    """A shared expert on its own CUDA stream, parallel to the work between begin and finish."""

    def begin(self, hidden_SBD: torch.Tensor) -> torch.Tensor:
        stream, current = self._stream(hidden_SBD.device), torch.cuda.current_stream()
        stream.wait_stream(current)
        hidden_SBD.record_stream(stream)
        with torch.cuda.stream(stream):
            return self(hidden_SBD)

    def finish(self, y_SBD: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        current.wait_stream(self._stream(y_SBD.device))
        y_SBD.record_stream(current)
        return y_SBD

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream, made at first use because a model may be built without a GPU."""
        if not hasattr(self, "_side_stream"):
            self._side_stream = torch.cuda.Stream(device)
        return self._side_stream
