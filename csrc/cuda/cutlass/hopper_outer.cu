#include "hopper.cuh"

namespace moe_parallel {
namespace {

template <class Tile>
using Product = HopperProduct<cutlass::bfloat16_t, cutlass::bfloat16_t,
                              cutlass::layout::ColumnMajor, cutlass::layout::RowMajor, Tile>;

}  // namespace

extern const Instantiation kHopperOuter = instantiation_of<Product<SquareTile>>();
extern const Instantiation kHopperOuterWide = instantiation_of<Product<WideTile>>();
extern const Instantiation kHopperOuterNarrow = instantiation_of<Product<NarrowTile>>();

}  // namespace moe_parallel
