#include "hopper.cuh"

namespace moe_parallel {

extern const HopperTiles kHopperProduct =
    hopper_tiles<cutlass::bfloat16_t, cutlass::bfloat16_t, cutlass::layout::RowMajor,
                 cutlass::layout::RowMajor>();

}  // namespace moe_parallel
