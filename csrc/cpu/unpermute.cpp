#include "../unpermute.h"

#include <ATen/Parallel.h>

#include <cstring>

#include "capability.h"
#include "large_output.h"
#include "parts.h"

namespace moe_parallel {
namespace {

template <class Task>
void check_rows(const Task& task) {
  for (int64_t choice = 0; choice < task.tokens * task.choices; ++choice) {
    TORCH_CHECK_INDEX(task.rows[choice] < task.num_rows, "row ", task.rows[choice], " lies beyond ",
                      task.num_rows, " rows");
  }
}

}  // namespace

void run_on_cpu(const Unpermute& given) {
  Unpermute task = given;
  check_rows(task);
  const int64_t bytes = bytes_of(task.type), stride = task.out_stride * bytes;
  advise_huge_pages(task.out, task.tokens * stride);
  task.past_caches = stores_past_caches(task.out, task.tokens, task.width * bytes, stride);
  in_parts(task.tokens, task.choices * task.width, kernels().unpermute, task);
}

void run_on_cpu(const UnpermuteBackward& given) {
  UnpermuteBackward task = given;
  check_rows(task);
  const int64_t row_bytes = task.width * bytes_of(task.type);
  advise_huge_pages(task.dy, task.num_rows * row_bytes);
  task.past_caches = stores_past_caches(task.dy, task.num_rows, row_bytes, row_bytes);
  in_parts(task.tokens, task.choices * task.width, kernels().unpermute_backward, task);
  at::parallel_for(0, task.num_rows, grain_of(task.width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (task.slots[row] < 0)
        std::memset(static_cast<char*>(task.dy) + row * row_bytes, 0, row_bytes);
    }
  });
}

}  // namespace moe_parallel
