#include "hopper.cuh"

namespace moe_parallel {

extern const HopperTiles kHopperOuterInFloat =
    hopper_tiles<cutlass::bfloat16_t, float, cutlass::layout::ColumnMajor,
                 cutlass::layout::RowMajor>();

}  // namespace moe_parallel
