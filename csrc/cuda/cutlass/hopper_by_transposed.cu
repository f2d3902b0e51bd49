#include "hopper.cuh"

namespace moe_parallel {

extern const HopperTiles kHopperByTransposed =
    hopper_tiles<cutlass::bfloat16_t, cutlass::bfloat16_t, cutlass::layout::RowMajor,
                 cutlass::layout::ColumnMajor>();

}  // namespace moe_parallel
