#include "hopper.cuh"

namespace moe_parallel {
namespace {

template <class Tile>
using Product = HopperProduct<cutlass::bfloat16_t, cutlass::bfloat16_t, cutlass::layout::RowMajor,
                              cutlass::layout::ColumnMajor, Tile>;

}  // namespace

extern const Instantiation kHopperByTransposed = instantiation_of<Product<SquareTile>>();
extern const Instantiation kHopperByTransposedWide = instantiation_of<Product<WideTile>>();
extern const Instantiation kHopperByTransposedNarrow = instantiation_of<Product<NarrowTile>>();

}  // namespace moe_parallel
