// Products of matrices, summed in a type that is at least as wide as the matrices'.
#pragma once

#include <ATen/core/Tensor.h>

namespace moe_parallel {

// Whether ATen multiplies this factor one value at a time, because oneDNN, its library for bf16 on
// x86-64, needs AVX-512.
bool is_slow_in_bf16(const at::Tensor& a);

// Whether oneDNN computes products of this factor, with a kernel that it compiles for their sizes.
bool is_compiled_for_its_sizes(const at::Tensor& a);

// out += a b, where `out` has another type than a and b, such as the fp32 main gradient of bf16
// weights. The product is not rounded to the type of a and b.
void add_wide_product(at::Tensor& out, const at::Tensor& a, const at::Tensor& b);

// out = a b, or out += a b if `accumulate`; `out` may have a wider type.
void product_out(at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                 bool accumulate = false);

}  // namespace moe_parallel
