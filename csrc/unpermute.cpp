#include "unpermute.h"

#include <ATen/ops/empty_like.h>

#include <optional>
#include <tuple>

#include "permute_tensors.h"

namespace moe_parallel {
namespace {

void check_map(const at::Tensor& y, const at::Tensor& slots, const at::Tensor& rows) {
  check_dim("y", y, 2);
  check_index("slots", slots, 1);
  check_index("rows", rows, 2);
  check_together(y, {slots, rows});
  TORCH_CHECK_VALUE(slots.size(0) == y.size(0), "y has ", y.size(0), " rows, the row map ",
                    slots.size(0));
}

void check_probs(const at::Tensor& probs, const at::Tensor& y, const at::Tensor& rows) {
  check_together(y, {probs});
  TORCH_CHECK_VALUE(probs.sizes() == rows.sizes(), "probs have shape ", probs.sizes(),
                    ", the row map ", rows.sizes());
  TORCH_CHECK_TYPE(probs.scalar_type() == sum_type_of(y), "probs must be ", sum_type_of(y),
                   " for rows of ", y.scalar_type(), ", not ", probs.scalar_type());
}

}  // namespace

at::Tensor unpermute(const at::Tensor& y, const at::Tensor& slots, const at::Tensor& rows,
                     const std::optional<at::Tensor>& probs) {
  check_map(y, slots, rows);
  at::Tensor probs_2d;
  if (probs) {
    check_probs(*probs, y, rows);
    probs_2d = probs->contiguous();
  }
  const auto y_rows = with_dense_rows(y);
  const auto rows_2d = rows.contiguous();
  auto out = y.new_empty({rows.size(0), y.size(1)});
  sum_rows_out(out, y_rows, rows_2d, probs_2d);
  return out;
}

std::tuple<at::Tensor, at::Tensor> unpermute_backward(const at::Tensor& dout, const at::Tensor& y,
                                                      const at::Tensor& slots,
                                                      const at::Tensor& rows,
                                                      const at::Tensor& probs) {
  check_map(y, slots, rows);
  check_probs(probs, y, rows);
  check_together(y, {dout});
  check_sizes("dout", dout, {rows.size(0), y.size(1)});
  check_same_type("dout", dout, "y", y);

  const auto dout_rows = dout.contiguous();
  const auto y_rows = y.contiguous();
  const auto slots_1d = slots.contiguous();
  const auto rows_2d = rows.contiguous();
  const auto probs_2d = probs.contiguous();
  auto dy = at::empty_like(y_rows);
  auto dprobs = at::empty_like(probs_2d);
  launch(y, UnpermuteBackward{.type = scalar_type_of("y", y),
                              .dout = dout_rows.const_data_ptr(),
                              .y = y_rows.const_data_ptr(),
                              .slots = slots_1d.const_data_ptr<int64_t>(),
                              .rows = rows_2d.const_data_ptr<int64_t>(),
                              .probs = probs_2d.const_data_ptr(),
                              .dy = dy.mutable_data_ptr(),
                              .dprobs = dprobs.mutable_data_ptr(),
                              .tokens = rows.size(0),
                              .choices = rows.size(1),
                              .num_rows = y.size(0),
                              .width = y.size(1)});
  return {dy, dprobs};
}

}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR("unpermute", "(Tensor y, Tensor slots, Tensor rows, Tensor? probs) -> Tensor",
                      moe_parallel::unpermute)
MOE_PARALLEL_OPERATOR("unpermute_backward",
                      "(Tensor dout, Tensor y, Tensor slots, Tensor rows, Tensor probs) "
                      "-> (Tensor dy, Tensor dprobs)",
                      moe_parallel::unpermute_backward)
