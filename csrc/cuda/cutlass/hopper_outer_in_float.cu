#include "hopper.cuh"

namespace moe_parallel {

extern const Instantiation kHopperOuterInFloat =
    instantiation_of<HopperProduct<cutlass::bfloat16_t, float, cutlass::layout::ColumnMajor,
                                   cutlass::layout::RowMajor>>();

}  // namespace moe_parallel
