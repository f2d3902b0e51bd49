// Grouped products that run in one kernel with the steps before and after them. Such kernels exist
// only for CUDA. If there is none for a product, the callers run step by step.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>

#include "fused_product.h"

namespace moe_parallel {

// Rows, and the matrices by which they are multiplied: one per group, [groups, depth, columns], or
// a transposed view of that. `second` is undefined for a product with one accumulator.
struct FusedOperands {
  GatheredRows a;
  at::Tensor first, second;
};

// The rows of a tensor with dense rows, in their order.
GatheredRows rows_of(const at::Tensor& x);

// Computes the sum of the operands' products and applies the epilogue to it. The operands have one
// type and `rows` rows each, of which counts[e] belong to group e. Returns false, and does nothing,
// if no kernel supports the product.
using Operands = std::initializer_list<FusedOperands>;
bool fused_gemm(Operands operands, const at::Tensor& counts, int64_t rows,
                const Epilogue& epilogue);

// The same for the products of all rows of x with every matrix of w, [groups, depth, columns]. The
// results are side by side.
bool fused_products(const at::Tensor& x, const at::Tensor& w, const Epilogue& epilogue);

enum class Fusing { kNever, kWhereFaster, kAlways };

// Sets the mode for the process and returns the previous one. kAlways uses every kernel that
// supports a product, even if it is not known to be faster.
Fusing set_fusing(Fusing fusing);

}  // namespace moe_parallel
