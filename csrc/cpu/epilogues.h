// Epilogues of fused products (fused_product.h) on the CPU. They take sums that are still in the
// caches, and compute the steps after the product. The sums are rounded first.
#pragma once

#include <cstdint>

#include "../fused_product.h"

namespace moe_parallel {

// A part of the result, and its sums.
template <class Rows>
struct EpiloguePart {
  ScalarType type;  // of all tensors but the probs and sums
  Rows epilogue;
  int64_t columns;                  // of the result
  int64_t first_row, first_column;  // of the part
  int64_t width;                    // columns of the part
  const float* first;               // [rows, width]
  const float* second;              // the same; null if the product has one accumulator
};

}  // namespace moe_parallel
