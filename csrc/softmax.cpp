// The softmax of logits and the gradient of its logarithm.
#include "softmax.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <tuple>

#include "launch.h"

namespace moe_parallel {
namespace {

std::tuple<at::Tensor, at::Tensor> softmax_sums(const at::Tensor& logits) {
  check_dim("logits", logits, 2);
  TORCH_CHECK_VALUE(logits.size(1) > 0, "logits have no columns");
  const auto type = scalar_type_of("logits", logits);
  const auto logits_2d = logits.contiguous();
  auto most = at::empty({logits.size(0)}, logits.options().dtype(sum_type_of(logits)));
  auto sums = at::empty_like(most);
  launch(logits, SoftmaxSums{.type = type,
                             .logits = logits_2d.const_data_ptr(),
                             .most = most.mutable_data_ptr(),
                             .sums = sums.mutable_data_ptr(),
                             .rows = logits.size(0),
                             .width = logits.size(1)});
  return {most, sums};
}

void softmax_gradient(at::Tensor& logits, const at::Tensor& labels, const at::Tensor& most,
                      const at::Tensor& sums) {
  check_dim("logits", logits, 2);
  TORCH_CHECK_VALUE(logits.is_contiguous(), "logits must be contiguous");
  check_index("labels", labels, 1);
  check_together(logits, {labels, most, sums});
  const auto type = scalar_type_of("logits", logits);
  check_sizes("labels", labels, {logits.size(0)});
  for (const auto& [name, tensor] : {std::pair{"most", most}, {"sums", sums}}) {
    check_sizes(name, tensor, {logits.size(0)});
    TORCH_CHECK_TYPE(tensor.scalar_type() == sum_type_of(logits), name, " must be ",
                     sum_type_of(logits), " for ", logits.scalar_type(), ", not ",
                     tensor.scalar_type());
  }
  const auto labels_1d = labels.contiguous(), most_1d = most.contiguous(),
             sums_1d = sums.contiguous();
  launch(logits, SoftmaxGradient{.type = type,
                                 .logits = logits.mutable_data_ptr(),
                                 .labels = labels_1d.const_data_ptr<int64_t>(),
                                 .most = most_1d.const_data_ptr(),
                                 .sums = sums_1d.const_data_ptr(),
                                 .rows = logits.size(0),
                                 .width = logits.size(1)});
}

}  // namespace
}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR("softmax_sums", "(Tensor logits) -> (Tensor most, Tensor sums)",
                      moe_parallel::softmax_sums)
MOE_PARALLEL_OPERATOR("softmax_gradient",
                      "(Tensor(a!) logits, Tensor labels, Tensor most, Tensor sums) -> ()",
                      moe_parallel::softmax_gradient)
