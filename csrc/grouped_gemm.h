// Matrix products of consecutive groups of rows: group e has counts[e] of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace moe_parallel {

void check_groups(const char* name, const at::Tensor& x, const at::Tensor& counts);

// out[rows of e] (+)= x[rows of e] w[e]; w [E, I, O] may be a transposed view, out may have gaps
// between its rows. counts is on x's device.
void grouped_gemm_out(at::Tensor& out, const at::Tensor& x, const at::Tensor& w,
                      const at::Tensor& counts, bool accumulate = false);

// out[e] (+)= x[rows of e]^T y[rows of e], nothing or zeros for an empty group. out may be of a
// wider type than x: a main gradient.
void grouped_outer_out(at::Tensor& out, const at::Tensor& x, const at::Tensor& y,
                       const at::Tensor& counts, bool accumulate = false);

}  // namespace moe_parallel
