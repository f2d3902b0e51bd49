// The gradient of C through its norms p, which exists once: dC += dL/dp / p C, and 0 where p is 0.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <optional>
#include <tuple>

#include "expert_rows.h"
#include "main_gradients.h"
#include "norm_topk.h"

namespace moe_parallel {

// dL/dp / p, or 0 where p is 0.
inline at::Tensor norm_factors(const at::Tensor& dnorms, const at::Tensor& norms) {
  return (dnorms / norms).masked_fill_(norms == 0, 0);
}

// c_NR = dc_NR + factors_N c_NR: C becomes its gradient, of which `dc_NR` is the part that does not
// come from norms. Undefined: there is no such part.
inline void to_norm_gradient(at::Tensor& c_NR, const at::Tensor& dc_NR,
                             const at::Tensor& factors_N) {
  const bool adds = dc_NR.defined();
  const auto experts =
      adds ? at::zeros({c_NR.size(0), 1}, c_NR.options().dtype(at::kLong)) : at::Tensor();
  launch(c_NR, NormGradient{.type = scalar_type_of("c", c_NR),
                            .c_TER = c_NR.const_data_ptr(),
                            .factors = factors_N.const_data_ptr(),
                            .experts = adds ? experts.const_data_ptr<int64_t>() : nullptr,
                            .dc_TKR = adds ? dc_NR.const_data_ptr() : nullptr,
                            .dc_TER = c_NR.mutable_data_ptr(),
                            .tokens = c_NR.size(0),
                            .num_experts = 1,
                            .rank = c_NR.size(1),
                            .k = adds ? 1 : 0});
}

// dW = x^T dC and dx (+)= dC W^T for a block whose rows of dC are in `dc_memory`.
struct ProductsOfGradient {
  const at::Tensor& w;  // [E, D, R]
  WeightGradient& dw;
  at::Tensor& dx;  // of ExpertRows::new_rows()
  bool adds_to_dx;

  void take(const RowBlock& block, ScratchRows& dc_memory, const at::Tensor& x_rows) const {
    const auto dc_rows = block.product(dc_memory);
    auto dx_rows = block.product(dx);
    dw.take(block, x_rows, dc_rows);
    grouped_gemm_out(dx_rows, dc_rows, block.experts(w).transpose(1, 2), block.product_counts,
                     adds_to_dx);
  }
};

// dC[t, e] = dnorms[t, e] / norms[t, e] * C[t, e], where the quotient is 0 if the norm is 0. For
// the chosen experts, the gradient of c_TKR is added. Without c_TER, C is recomputed.
std::tuple<at::Tensor, at::Tensor> norm_topk_backward(const at::Tensor& dnorms,
                                                      const std::optional<at::Tensor>& dc_TKR,
                                                      const at::Tensor& x, const at::Tensor& w,
                                                      const at::Tensor& norms,
                                                      const at::Tensor& experts,
                                                      const std::optional<at::Tensor>& c_TER);

// The same through the norms of the chosen experts only: K products with x per token, not E. The
// row map is that of `experts`. Without c_TKR, C is recomputed.
std::tuple<at::Tensor, at::Tensor> norm_topk_chosen_backward(
    const at::Tensor& dnorms, const std::optional<at::Tensor>& dc_TKR, const at::Tensor& x,
    const at::Tensor& w, const at::Tensor& norms, const at::Tensor& experts,
    const std::optional<at::Tensor>& c_TKR, const at::Tensor& slots, const at::Tensor& rows,
    const at::Tensor& counts);

}  // namespace moe_parallel
