"""The operators in C++ (csrc/), as reference.py specifies them, on CPU and, if built, on CUDA.

Importing this package registers `torch.ops.moe_parallel.*` with their shapes (fake kernels, for
tracing) and gradients. Each C++ operator takes and returns plain tensors. The functions here add
RowMap and optional arguments. The modules have the names of the files in csrc/.
"""

from moe_parallel.ops import extension

extension.load()  # before the modules below, which look the operators up

from moe_parallel.ops.native.attention import attention  # noqa: E402
from moe_parallel.ops.native.autonomous_experts import autonomous_experts  # noqa: E402
from moe_parallel.ops.native.expert_merge import expert_merge  # noqa: E402
from moe_parallel.ops.native.grouped_gemm import grouped_gemm  # noqa: E402
from moe_parallel.ops.native.norm_topk import norm_topk  # noqa: E402
from moe_parallel.ops.native.packed_rows import pack_rows, visits  # noqa: E402
from moe_parallel.ops.native.permute import permute  # noqa: E402
from moe_parallel.ops.native.product import product  # noqa: E402
from moe_parallel.ops.native.rms_norm import rms_norm  # noqa: E402
from moe_parallel.ops.native.rotary import rotary, split_and_rotate  # noqa: E402
from moe_parallel.ops.native.routed_experts import routed_experts  # noqa: E402
from moe_parallel.ops.native.routing_map import routing_map  # noqa: E402
from moe_parallel.ops.native.softmax import softmax_gradient, softmax_sums  # noqa: E402
from moe_parallel.ops.native.swiglu import swiglu, swiglu_halves  # noqa: E402
from moe_parallel.ops.native.unpermute import unpermute  # noqa: E402

__all__ = [
    "attention",
    "autonomous_experts",
    "expert_merge",
    "grouped_gemm",
    "norm_topk",
    "pack_rows",
    "permute",
    "product",
    "rms_norm",
    "rotary",
    "routed_experts",
    "routing_map",
    "softmax_gradient",
    "softmax_sums",
    "split_and_rotate",
    "swiglu",
    "swiglu_halves",
    "unpermute",
    "visits",
]
