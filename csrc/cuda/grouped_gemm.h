// Grouped products of CUDA tensors.
#pragma once

#include <ATen/core/Tensor.h>

namespace moe_parallel {

// The same as grouped_gemm_out() and grouped_outer_out(), without waiting for the counts. They
// return false, and do nothing, if a loop over the groups is faster in this build, although it
// waits.
bool grouped_gemm_on_cuda(at::Tensor& out, const at::Tensor& x, const at::Tensor& w,
                          const at::Tensor& counts, bool accumulate);
bool grouped_outer_on_cuda(at::Tensor& out, const at::Tensor& x, const at::Tensor& y,
                           const at::Tensor& counts, bool accumulate);

}  // namespace moe_parallel
