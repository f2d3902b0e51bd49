// Products of rows by groups in one kernel with what comes before and after them, where there is
// one: on CUDA. Elsewhere the callers go step by step.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>

#include "fused_product.h"

namespace moe_parallel {

// Rows times a matrix a group, [groups, depth, columns], or a transposed view of such; an undefined
// one adds nothing.
struct FusedOperands {
  GatheredRows a;
  at::Tensor first, second;
};

// The rows of a tensor with dense rows, as they lie.
GatheredRows rows_of(const at::Tensor& x);

// The sum over the operands, which are of one type, of `rows` rows, counts[e] of which belong to
// group e, with what the epilogue makes of it. False, with nothing done, where no kernel takes it.
using Operands = std::initializer_list<FusedOperands>;
bool fused_gemm(Operands operands, const at::Tensor& counts, int64_t rows,
                const Epilogue& epilogue);

// The same of all rows of x with every group's matrix of w, [groups, depth, columns], the results
// side by side.
bool fused_products(const at::Tensor& x, const at::Tensor& w, const Epilogue& epilogue);

enum class Fusing { kNever, kWhereFaster, kAlways };

// For the process. kAlways: wherever a kernel takes it. Returns what held before.
Fusing set_fusing(Fusing fusing);

}  // namespace moe_parallel
