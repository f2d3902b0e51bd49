"""The operators of a mixture of experts, behind one interface.

    ops = select_backend("auto")
    row_map = ops.routing_map(experts_TK, num_experts)
    y_TD = ops.routed_experts(x_TD, probs_TK, row_map, w_gate_up_ED2F, w_out_EFD)

which is the same as

    x_ND = ops.permute(x_TD, row_map)
    gate_NF, up_NF = ops.grouped_gemm(x_ND, w_gate_up_ED2F, row_map.counts_E).chunk(2, dim=1)
    h_NF = ops.swiglu(gate_NF, up_NF, probs_N)
    y_TD = ops.unpermute(ops.grouped_gemm(h_NF, w_out_EFD, row_map.counts_E), row_map)

`reference.py` is the specification. It documents shapes, dtypes and gradients.
"""

from dataclasses import fields
from types import ModuleType

import torch

from moe_parallel.errors import InputError
from moe_parallel.ops import extension, reference
from moe_parallel.ops.types import NormScores, Ops, RowMap

__all__ = ["BACKENDS", "Ops", "RowMap", "NormScores", "select_backend"]

BACKENDS = ("reference", "native", "auto")


def select_backend(name: str) -> Ops:
    """The operators of the backend `name`: reference, native (the C++ extension) or auto.

    auto is native if the extension is built, unless the extension has no CUDA kernels and the
    machine has a GPU; then auto is reference. Raises InputError for another name, and for native
    if the extension is not built.
    """
    if name not in BACKENDS:
        raise InputError(f"--moe-backend {name!r} is unknown: choose one of {', '.join(BACKENDS)}")
    if name == "native" or (name == "auto" and _native_serves_this_machine()):
        import moe_parallel.ops.native as native  # registers operators, so only when asked for

        return _operators_of("native", native)
    return _operators_of("reference", reference)


def _operators_of(name: str, module: ModuleType) -> Ops:
    operators = [field.name for field in fields(Ops) if field.name not in ("name", "read_sizes")]
    return Ops(name, **{operator: getattr(module, operator) for operator in operators})


def _native_serves_this_machine() -> bool:
    return extension.is_built() and (extension.has_cuda() or not torch.cuda.is_available())
