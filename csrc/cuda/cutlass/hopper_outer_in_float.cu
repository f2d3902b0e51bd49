#include "hopper.cuh"

namespace moe_parallel {
namespace {

template <class Tile>
using Product = HopperProduct<cutlass::bfloat16_t, float, cutlass::layout::ColumnMajor,
                              cutlass::layout::RowMajor, Tile>;

}  // namespace

extern const Instantiation kHopperOuterInFloat = instantiation_of<Product<SquareTile>>();
extern const Instantiation kHopperOuterInFloatWide = instantiation_of<Product<WideTile>>();
extern const Instantiation kHopperOuterInFloatNarrow = instantiation_of<Product<NarrowTile>>();

}  // namespace moe_parallel
