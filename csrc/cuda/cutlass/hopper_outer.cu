#include "hopper.cuh"

namespace moe_parallel {

extern const HopperTiles kHopperOuter =
    hopper_tiles<cutlass::bfloat16_t, cutlass::bfloat16_t, cutlass::layout::ColumnMajor,
                 cutlass::layout::RowMajor>();

}  // namespace moe_parallel
