// Matrix products of consecutive groups of rows. Group e has counts[e] rows.
#pragma once

#include <ATen/core/Tensor.h>

#include "scratch_rows.h"

namespace moe_parallel {

void check_groups(const char* name, const at::Tensor& x, const at::Tensor& counts);

// out[rows of e] (+)= x[rows of e] w[e]. w, [E, I, O], may be a transposed view, and out may have
// gaps between its rows. counts is on the device of x.
void grouped_gemm_out(at::Tensor& out, const at::Tensor& x, const at::Tensor& w,
                      const at::Tensor& counts, bool accumulate = false);

// out[e] (+)= x[rows of e]^T y[rows of e]. For an empty group, out[e] keeps its value if
// `accumulate` is true and becomes zero otherwise. out may have a wider type than x, as a main
// gradient does. `memory` is reused by all groups.
void grouped_outer_out(at::Tensor out, const at::Tensor& x, const at::Tensor& y,
                       const at::Tensor& counts, bool accumulate, TransposedRows& memory);

}  // namespace moe_parallel
