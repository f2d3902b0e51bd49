// Products of narrow matrices into a wider one.
#pragma once

#include <ATen/core/Tensor.h>

namespace moe_parallel {

// out += a b for `out` of another type than a and b, such as the fp32 main gradient of bf16
// weights: the product is not rounded to their type on its way.
void add_wide_product(at::Tensor& out, const at::Tensor& a, const at::Tensor& b);

}  // namespace moe_parallel
