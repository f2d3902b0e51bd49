#include "hopper.cuh"

namespace moe_parallel {

extern const Instantiation kHopperOuter =
    instantiation_of<HopperProduct<cutlass::bfloat16_t, cutlass::bfloat16_t,
                                   cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>>();

}  // namespace moe_parallel
