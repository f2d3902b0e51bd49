// The kernels of this build. The compiler needs most of a minute and gigabytes of memory for an
// instantiation for Hopper, so each has a file of its own.
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

// The kernels of one element type, by the layouts of a and b: row-major and row-major (x w),
// row-major and column-major (x w^T), column-major and row-major (x^T y), and the last with a float
// result.
struct Instantiations {
  Instantiation product, by_transposed, outer, outer_in_float;
};

extern const Instantiation kHopperProduct, kHopperByTransposed, kHopperOuter, kHopperOuterInFloat;
extern const Instantiations kAmpereBFloat16, kAmpereFloat16, kAmpereTf32;

}  // namespace moe_parallel
