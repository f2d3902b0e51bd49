// Memory for rows, and for transposed copies of rows, that is reused.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

namespace moe_parallel {

// Memory that is reused, and allocated when it is first needed.
class ScratchRows {
 public:
  // `most_rows`: for how many rows memory is allocated at least. Where more are needed, other
  // memory takes its place.
  ScratchRows(const at::Tensor& like, int64_t most_rows, int64_t columns)
      : like_(like.new_empty({0})), most_rows_(most_rows), columns_(columns) {}

  at::Tensor rows(int64_t count) {
    if (!buffer_.defined() || buffer_.size(0) < count) {
      buffer_ = at::Tensor();  // before the larger one is allocated
      buffer_ = like_.new_empty({std::max(count, most_rows_), columns_});
    }
    return buffer_.narrow(0, 0, count);
  }

 private:
  at::Tensor like_, buffer_;
  int64_t most_rows_, columns_;
};

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
