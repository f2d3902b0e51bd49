#include "hopper.cuh"

namespace moe_parallel {

extern const Instantiation kHopperByTransposed =
    instantiation_of<HopperProduct<cutlass::bfloat16_t, cutlass::bfloat16_t,
                                   cutlass::layout::RowMajor, cutlass::layout::ColumnMajor>>();

}  // namespace moe_parallel
