#include "expert_merge.h"

#include <ATen/ops/empty.h>

#include <tuple>

#include "launch.h"

namespace moe_parallel {
namespace {

void check_inputs(const at::Tensor& weights, const at::Tensor& w) {
  check_dim("weights", weights, 2);
  check_dim("w", w, 3);
  check_together(w, {weights});
  TORCH_CHECK_VALUE(weights.size(1) == w.size(0), "weights are for ", weights.size(1),
                    " experts, w has ", w.size(0));
  TORCH_CHECK_TYPE(weights.scalar_type() == sum_type_of(w), "weights must be ", sum_type_of(w),
                   " for experts of ", w.scalar_type(), ", not ", weights.scalar_type());
}

at::Tensor expert_merge(const at::Tensor& weights, const at::Tensor& w) {
  check_inputs(weights, w);
  const auto weights_2d = weights.contiguous();
  const auto w_3d = w.contiguous();
  auto merged = w.new_empty({weights.size(0), w.size(1), w.size(2)});
  launch(w, ExpertMerge{.type = scalar_type_of("w", w),
                        .weights = weights_2d.const_data_ptr(),
                        .w = w_3d.const_data_ptr(),
                        .merged = merged.mutable_data_ptr(),
                        .merges = weights.size(0),
                        .num_experts = w.size(0),
                        .size = w.size(1) * w.size(2)});
  return merged;
}

std::tuple<at::Tensor, at::Tensor> expert_merge_backward(const at::Tensor& dmerged,
                                                         const at::Tensor& weights,
                                                         const at::Tensor& w) {
  check_inputs(weights, w);
  check_sizes("dmerged", dmerged, {weights.size(0), w.size(1), w.size(2)});
  check_same_type("dmerged", dmerged, "w", w);
  check_together(w, {dmerged});
  const auto dmerged_3d = dmerged.contiguous();
  const auto weights_2d = weights.contiguous();
  const auto w_3d = w.contiguous();
  auto dweights = at::empty(weights.sizes(), weights.options());
  auto dw = at::empty(w.sizes(), w.options());
  launch(w, ExpertMergeBackward{.type = scalar_type_of("w", w),
                                .dmerged = dmerged_3d.const_data_ptr(),
                                .weights = weights_2d.const_data_ptr(),
                                .w = w_3d.const_data_ptr(),
                                .dweights = dweights.mutable_data_ptr(),
                                .dw = dw.mutable_data_ptr(),
                                .merges = weights.size(0),
                                .num_experts = w.size(0),
                                .size = w.size(1) * w.size(2)});
  return {dweights, dw};
}

}  // namespace
}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR("expert_merge", "(Tensor weights, Tensor w) -> Tensor",
                      moe_parallel::expert_merge)
MOE_PARALLEL_OPERATOR("expert_merge_backward",
                      "(Tensor dmerged, Tensor weights, Tensor w) -> (Tensor dweights, Tensor dw)",
                      moe_parallel::expert_merge_backward)
