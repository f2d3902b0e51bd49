// Transposed copies of rows, as factors of products.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "scratch_rows.h"

namespace moe_parallel {

// Memory for one transposed copy at a time. oneDNN multiplies x^T y in bf16 at half of its speed if
// x^T is a view, and a copy costs less than a tenth of the product.
class TransposedRows {
 public:
  // x^T, for a product in the type of x. It is a copy, valid until the next call, where this is
  // faster, and otherwise a view.
  at::Tensor of(const at::Tensor& x);

 private:
  std::optional<ScratchRows> memory_;
};

}  // namespace moe_parallel
