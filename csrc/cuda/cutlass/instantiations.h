// The kernels of this build. The compiler needs gigabytes of memory for an instantiation for
// Hopper, and half of its time for CUTLASS's headers. So each layout has a file, with all tiles.
#pragma once

#include "products.h"

namespace moe_parallel {

struct Instantiation {
  int64_t (*workspace)(const GroupedProduct&, const Device&);
  const char* (*run)(const GroupedProduct&, const Device&, void* workspace, cudaStream_t);
};

template <class Product>
constexpr Instantiation instantiation_of() {
  return {Product::workspace, Product::run};
}

// The kernels of an element type, by ProductKind.
struct Instantiations {
  Instantiation product, by_transposed, outer, outer_in_float;
};
extern const Instantiations kAmpereBFloat16, kAmpereFloat16, kAmpereTf32;

// The kernels of a kind for Hopper, in bf16.
struct HopperTiles {
  Instantiation square, wide, narrow;
};
extern const HopperTiles kHopperProduct, kHopperByTransposed, kHopperOuter, kHopperOuterInFloat;

}  // namespace moe_parallel
