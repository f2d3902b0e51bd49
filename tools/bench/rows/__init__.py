"""The benches of every operator, by name."""

from collections.abc import Callable

from moe_parallel.ops import Ops
from tools.bench.contender import Bench
from tools.bench.inputs import Draw
from tools.bench.rows import attention, layers, permutation, products, selection
from tools.bench.sizes import BenchSize

BENCHES: dict[str, Callable[[BenchSize, Draw, Ops], Bench]] = {
    "routing_map": selection.routing_map,
    "permute": permutation.permute,
    "unpermute": permutation.unpermute,
    "grouped_gemm": products.grouped_gemm,
    "swiglu": products.swiglu,
    "norm_topk": selection.norm_topk,
    "expert_merge": products.expert_merge,
    "attention": attention.attention,
    "routed_layer": layers.routed_layer,
    "aoe_layer": layers.aoe_layer,
}
