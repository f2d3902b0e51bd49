// RMSNorm on the CPU. On CUDA torch's own kernel serves.
#include "rms_norm.h"

#include <ATen/ops/empty.h>

#include <tuple>

#include "launch.h"

namespace moe_parallel {
namespace {

void check_rows(const at::Tensor& x, const at::Tensor& weight) {
  check_dim("x", x, 2);
  check_sizes("weight", weight, {x.size(1)});
  check_together(x, {weight});
}

at::Tensor in_type_of_sums(const at::Tensor& weight, const at::Tensor& x) {
  return weight.contiguous().to(sum_type_of(x));
}

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight,
                                            double eps) {
  check_rows(x, weight);
  const auto x_2d = x.contiguous();
  const auto weight_1d = in_type_of_sums(weight, x);
  auto y = at::empty(x.sizes(), x.options());
  auto r = at::empty({x.size(0)}, weight_1d.options());
  run_on_cpu(RmsNorm{.type = scalar_type_of("x", x),
                     .x = x_2d.const_data_ptr(),
                     .weight = weight_1d.const_data_ptr(),
                     .y = y.mutable_data_ptr(),
                     .r = r.mutable_data_ptr(),
                     .rows = x.size(0),
                     .width = x.size(1),
                     .eps = eps});
  return {y, r};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& dy, const at::Tensor& x,
                                                     const at::Tensor& weight,
                                                     const at::Tensor& r) {
  check_rows(x, weight);
  check_sizes("dy", dy, x.sizes());
  check_same_type("dy", dy, "x", x);
  check_sizes("r", r, {x.size(0)});
  TORCH_CHECK_TYPE(r.scalar_type() == sum_type_of(x), "r must be ", sum_type_of(x), " for rows of ",
                   x.scalar_type(), ", not ", r.scalar_type());
  check_together(x, {dy, r});
  const auto dy_2d = dy.contiguous();
  const auto x_2d = x.contiguous();
  const auto weight_1d = in_type_of_sums(weight, x);
  const auto r_1d = r.contiguous();
  auto dx = at::empty(x.sizes(), x.options());
  RmsNormBackward task{.type = scalar_type_of("x", x),
                       .dy = dy_2d.const_data_ptr(),
                       .x = x_2d.const_data_ptr(),
                       .weight = weight_1d.const_data_ptr(),
                       .r = r_1d.const_data_ptr(),
                       .dx = dx.mutable_data_ptr(),
                       .dweights = nullptr,
                       .rows = x.size(0),
                       .width = x.size(1)};
  auto dweights = at::empty({task.parts(), x.size(1)}, weight_1d.options());
  task.dweights = dweights.mutable_data_ptr();
  run_on_cpu(task);
  return {dx, dweights.sum(0).to(weight.scalar_type())};
}

}  // namespace
}  // namespace moe_parallel

MOE_PARALLEL_CPU_OPERATOR("rms_norm",
                          "(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor r)",
                          moe_parallel::rms_norm)
MOE_PARALLEL_CPU_OPERATOR("rms_norm_backward",
                          "(Tensor dy, Tensor x, Tensor weight, Tensor r) "
                          "-> (Tensor dx, Tensor dweight)",
                          moe_parallel::rms_norm_backward)
