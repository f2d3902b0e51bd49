#include "../permute.h"

#include <ATen/Parallel.h>

#include <cstring>

#include "loops.h"

namespace moe_parallel {

void run_on_cpu(const Permute& task) {
  const auto* x = static_cast<const char*>(task.x);
  auto* y = static_cast<char*>(task.y);
  at::parallel_for(0, task.rows, grain_of(task.row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t slot = task.slots[row];
      char* target = y + row * task.row_bytes;
      if (slot < 0) {
        std::memset(target, 0, task.row_bytes);
        continue;
      }
      const int64_t token = slot / task.choices;
      TORCH_CHECK_INDEX(token < task.tokens, "slot ", slot, " lies beyond ", task.tokens,
                        " tokens");
      std::memcpy(target, x + token * task.row_bytes, task.row_bytes);
    }
  });
}

}  // namespace moe_parallel
