#include "hopper.cuh"

namespace moe_parallel {

extern const Instantiation kHopperProduct =
    instantiation_of<HopperProduct<cutlass::bfloat16_t, cutlass::bfloat16_t,
                                   cutlass::layout::RowMajor, cutlass::layout::RowMajor>>();

}  // namespace moe_parallel
