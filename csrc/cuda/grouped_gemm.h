// Products of groups of rows of CUDA tensors.
#pragma once

#include <ATen/core/Tensor.h>

namespace moe_parallel {

// As grouped_gemm_out() and grouped_outer_out() without waiting for the counts; false, with nothing
// done, where in this build a loop over the groups, which waits, is the fast way.
bool grouped_gemm_on_cuda(at::Tensor& out, const at::Tensor& x, const at::Tensor& w,
                          const at::Tensor& counts, bool accumulate);
bool grouped_outer_on_cuda(at::Tensor& out, const at::Tensor& x, const at::Tensor& y,
                           const at::Tensor& counts, bool accumulate);

}  // namespace moe_parallel
