// Rows of tensors gathered and summed, for the operators and the fused layers. The tensors have
// dense rows, which may be apart.
#pragma once

#include <ATen/core/Tensor.h>

#include "launch.h"
#include "permute.h"
#include "unpermute.h"

namespace moe_parallel {

// out[n] = x[slots[n] / choices], or zeros if slots[n] < 0. `row_of_choice`: the inverse map, if
// out has all its rows.
inline void gather_rows_out(at::Tensor out, const at::Tensor& x, const at::Tensor& slots,
                            int64_t choices, const int64_t* row_of_choice = nullptr) {
  const int64_t bytes = bytes_of_element(x);
  launch(x, Permute{.x = x.const_data_ptr(),
                    .slots = slots.const_data_ptr<int64_t>(),
                    .y = out.mutable_data_ptr(),
                    .tokens = x.size(0),
                    .choices = choices,
                    .rows = slots.numel(),
                    .row_bytes = x.size(1) * bytes,
                    .x_stride = x.stride(0) * bytes,
                    .y_stride = out.stride(0) * bytes,
                    .row_of_choice = row_of_choice});
}

// out[t] = sum over k of probs[t, k] * y[rows[t, k]]; without probs, of y[rows[t, k]].
inline void sum_rows_out(at::Tensor out, const at::Tensor& y, const at::Tensor& rows,
                         const at::Tensor& probs = {}) {
  launch(y, Unpermute{.type = scalar_type_of("y", y),
                      .y = y.const_data_ptr(),
                      .rows = rows.const_data_ptr<int64_t>(),
                      .probs = probs.defined() ? probs.const_data_ptr() : nullptr,
                      .out = out.mutable_data_ptr(),
                      .tokens = rows.size(0),
                      .choices = rows.size(1),
                      .num_rows = y.size(0),
                      .width = y.size(1),
                      .y_stride = y.stride(0),
                      .out_stride = out.stride(0)});
}

}  // namespace moe_parallel
