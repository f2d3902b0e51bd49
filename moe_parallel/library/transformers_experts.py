"""The experts of transformers' models, computed by our operators.

    from moe_parallel import register_experts

    register_experts()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moe_parallel")

The operators read the weights as they lie in transformers' modules. Usually that is [E, 2F, D] and
[E, D, F], the transpose of what the operators take: they take a view, and lay gradients out as the
weights.

Shape suffixes: T tokens, K choices of each, E experts, D model width, F expert width, N rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_parallel.errors import InputError
from moe_parallel.ops import Ops, RowMap, extension, select_backend
from moe_parallel.optional import import_optional

NAME = "moe_parallel"


def register_experts() -> None:
    """Adds `experts_implementation="moe_parallel"` to transformers.

    Every model whose experts have transformers' interface takes it, at construction or by
    `model.set_experts_implementation`.

    Raises InputError: transformers is not installed, or the C++ extension is not built.
    """
    interface = import_optional("transformers.integrations.moe", "register_experts()")
    if not extension.is_built():
        raise InputError(
            "register_experts() needs the C++ extension, which is not built: build it with "
            f"{extension.BUILD}"
        )
    interface.ALL_EXPERTS_FUNCTIONS.register(NAME, partial(_forward, select_backend("native")))


def _forward(ops: Ops, experts: Any, x_TD: Tensor, experts_TK: Tensor, probs_TK: Tensor) -> Tensor:
    """The sum of prob * E_i(x) over each token's choices: [T, D].

    Args:
        experts: a module of transformers, of which this is the forward pass.
        experts_TK: those of other ranks have the number of experts here, or more.
    """
    device, count = x_TD.device.type, experts.num_experts
    if device == "cuda" and not extension.has_cuda():
        raise InputError(
            f"experts_implementation={NAME!r} on a GPU needs the CUDA kernels, which are not "
            f"built: put nvcc on the PATH and build them with {extension.BUILD}"
        )
    w_in = experts.gate_up_proj if experts.has_gate else experts.up_proj
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else w_in.dtype
    w_in, w_out = (
        (w if experts.is_transposed else w.transpose(1, 2)).to(dtype)
        for w in (w_in, experts.down_proj)
    )
    num_rows: int | None = experts_TK.numel()
    if experts._is_expert_parallel:  # some of the choices are of other ranks
        experts_TK, num_rows = experts_TK.masked_fill(experts_TK >= count, -1), None
    row_map = ops.routing_map(experts_TK, count, num_rows=num_rows)
    if _are_swiglu(experts):
        y_TD = ops.routed_experts(x_TD.to(dtype), probs_TK, row_map, w_in, w_out)
    else:
        y_TD = _in_steps(ops, experts, x_TD.to(dtype), probs_TK, row_map, w_in, w_out)
    return y_TD.to(x_TD.dtype)


def _are_swiglu(experts: Any) -> bool:
    """Whether an expert is (silu(x W_g) * (x W_p)) W_o."""
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    return (
        experts.has_gate
        and type(experts)._apply_gate is _default_apply_gate
        and isinstance(experts.act_fn, (nn.SiLU, SiLUActivation))
        and not (experts.has_bias or experts.has_post_expert_norm)
    )


def _in_steps(
    ops: Ops,
    experts: Any,
    x_TD: Tensor,
    probs_TK: Tensor,
    row_map: RowMap,
    w_in: Tensor,
    w_out: Tensor,
) -> Tensor:
    """Other experts (biases, activations, norms): the module's own code between our products."""
    counts_E, num_rows = row_map.counts_E, row_map.slots_N.size(0)

    def multiply(x_ND: Tensor, w: Tensor, name: str) -> Tensor:
        y_ND = ops.grouped_gemm(x_ND, w, counts_E)
        if not experts.has_bias:
            return y_ND
        bias = getattr(experts, f"{name}_bias").to(w.dtype)
        return y_ND + bias.repeat_interleave(counts_E, dim=0, output_size=num_rows)

    x_ND = ops.permute(x_TD, row_map)
    if experts.has_gate:
        h_NF = experts._apply_gate(multiply(x_ND, w_in, "gate_up_proj"))
    else:
        h_NF = experts.act_fn(multiply(x_ND, w_in, "up_proj"))
    y_ND = multiply(h_NF.to(w_out.dtype), w_out, "down_proj")
    if experts.has_post_expert_norm:
        y_ND = experts.post_expert_norm(y_ND)
    return ops.unpermute(y_ND, row_map, probs_TK)
