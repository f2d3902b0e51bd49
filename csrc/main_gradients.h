// The destinations of the gradients of the experts' weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "expert_rows.h"
#include "grouped_gemm.h"
#include "launch.h"

namespace moe_parallel {

// The gradient of a weight [experts, ...]. It is a tensor of its own, or it is added to a main
// gradient.
class WeightGradient {
 public:
  // `memory`: for a transposed copy; all gradients of a layer share it. `main`: the main gradient,
  // if there is one. It has the weight's type or a wider one.
  WeightGradient(const char* name, const at::Tensor& w, const at::Tensor& counts,
                 TransposedRows& memory, const std::optional<at::Tensor>& main = std::nullopt)
      : memory_(memory),
        own_(main ? w.new_empty({0}) : w.new_empty(w.sizes())),
        sum_(main.value_or(own_)),
        adds_(main.has_value()) {
    if (adds_) {
      check_sizes(name, sum_, w.sizes());
      check_together(w, {sum_});
      const auto wide = sum_type_of(w);
      TORCH_CHECK_TYPE(sum_.scalar_type() == w.scalar_type() || sum_.scalar_type() == wide, name,
                       " is ", sum_.scalar_type(), ", its weight ", w.scalar_type(),
                       ": it must be ", wide, " or as the weight");
    } else if (counts.is_cpu()) {
      clear_without_rows(counts);
    }
  }

  // x[rows of e]^T y[rows of e] for each expert e of the block, which is added to that of the
  // blocks before if they have rows of e.
  void take(const RowBlock& block, const at::Tensor& x, const at::Tensor& y) {
    grouped_outer_out(block.experts(sum_), x, y, block.product_counts,
                      adds_ || !block.begins_expert, memory_);
  }

  // The tensor that the operator returns. It is empty if the gradient is added to a main gradient.
  const at::Tensor& own() const { return own_; }

 private:
  // On the CPU, an expert without rows is in no block, so take() does not write its gradient.
  void clear_without_rows(const at::Tensor& counts) {
    const auto on_host = counts.contiguous();
    for (int64_t e = 0; e < on_host.size(0); ++e) {
      if (on_host.const_data_ptr<int64_t>()[e] == 0) own_.select(0, e).zero_();
    }
  }

  TransposedRows& memory_;
  at::Tensor own_, sum_;
  bool adds_;
};

}  // namespace moe_parallel
