#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

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

}  // namespace moe_parallel
