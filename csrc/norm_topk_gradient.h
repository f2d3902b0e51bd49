// The gradient of C through its norms p, for all operators that need it: dC += (dL/dp / p) C, and 0
// where p is 0.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "expert_rows.h"
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

// The gradient through the norms of the chosen experts, for their rows: C becomes dC, which is then
// multiplied by x and W. One block may have all rows.
struct ChosenNormGradient {
  const at::Tensor& w;  // [E, D, R]
  WeightGradient& dw;   // dW = x^T dC
  at::Tensor& dx;       // of ExpertRows::new_rows()
  bool adds_to_dx;      // dx += dC W^T, or dx = dC W^T
  // Whether the part through the norms is rounded to the type of sums before the rest is added.
  bool rounds_before_adding;

  // Of a block, x_of() returns the rows of x for products, c_of() writes C to `c_memory` after
  // that, and dc_of() returns the part of dC that does not come from norms; undefined: there is
  // none. `factors_N` is dL/dp / p of each row.
  template <class X, class C, class DC>
  void take(const std::vector<RowBlock>& blocks, const at::Tensor& factors_N, ScratchRows& c_memory,
            const X& x_of, const C& c_of, const DC& dc_of) const {
    for (const auto& block : blocks) {
      const auto x_rows = x_of(block);
      c_of(block);
      to_gradient(block.part(c_memory), dc_of(block), block.rows(factors_N));
      const auto dc_rows = block.product(c_memory);
      auto dx_rows = block.product(dx);
      dw.take(block, x_rows, dc_rows);
      grouped_gemm_out(dx_rows, dc_rows, block.experts(w).transpose(1, 2), block.product_counts,
                       adds_to_dx);
    }
  }

 private:
  void to_gradient(at::Tensor c_rows, const at::Tensor& dc_rows,
                   const at::Tensor& factors_of_rows) const {
    if (!rounds_before_adding || !dc_rows.defined()) {
      to_norm_gradient(c_rows, dc_rows, factors_of_rows);
      return;
    }
    auto sums = c_rows.to(sum_type_of(c_rows));
    to_norm_gradient(sums, {}, factors_of_rows);
    c_rows.copy_(sums.add_(dc_rows));
  }
};

}  // namespace moe_parallel
