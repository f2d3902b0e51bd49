// Products of matrices that are added to a matrix of a wider type.
#pragma once

#include <ATen/core/Tensor.h>

namespace moe_parallel {

// out += a b, where `out` has another type than a and b, such as the fp32 main gradient of bf16
// weights. The product is not rounded to the type of a and b.
void add_wide_product(at::Tensor& out, const at::Tensor& a, const at::Tensor& b);

}  // namespace moe_parallel
