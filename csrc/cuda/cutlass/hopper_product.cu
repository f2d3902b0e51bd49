#include "hopper.cuh"

namespace moe_parallel {
namespace {

template <class Tile>
using Product = HopperProduct<cutlass::bfloat16_t, cutlass::bfloat16_t, cutlass::layout::RowMajor,
                              cutlass::layout::RowMajor, Tile>;

}  // namespace

extern const Instantiation kHopperProduct = instantiation_of<Product<SquareTile>>();
extern const Instantiation kHopperProductWide = instantiation_of<Product<WideTile>>();
extern const Instantiation kHopperProductNarrow = instantiation_of<Product<NarrowTile>>();

}  // namespace moe_parallel
