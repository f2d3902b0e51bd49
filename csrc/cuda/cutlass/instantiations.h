// The kernels there are. An instantiation for Hopper takes a compiler most of a minute and
// gigabytes, so each is a file of its own.
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

// Of one type, by what lies dense in a and b: rows and rows (x w), rows and columns (x w^T),
// columns and rows (x^T y), and the last with a float result.
struct Instantiations {
  Instantiation product, by_transposed, outer, outer_in_float;
};

extern const Instantiation kHopperProduct, kHopperByTransposed, kHopperOuter, kHopperOuterInFloat;
extern const Instantiations kAmpereBFloat16, kAmpereFloat16, kAmpereTf32;

}  // namespace moe_parallel
