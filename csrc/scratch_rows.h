#pragma once

#include <ATen/core/Tensor.h>

namespace moe_parallel {

// Memory that is reused, and allocated when it is first needed.
class ScratchRows {
 public:
  ScratchRows(const at::Tensor& like, int64_t most_rows, int64_t columns)
      : like_(like), most_rows_(most_rows), columns_(columns) {}

  at::Tensor rows(int64_t count) {
    if (!buffer_.defined()) buffer_ = like_.new_empty({most_rows_, columns_});
    return buffer_.narrow(0, 0, count);
  }

 private:
  at::Tensor like_, buffer_;
  int64_t most_rows_, columns_;
};

}  // namespace moe_parallel
