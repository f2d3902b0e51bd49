#include "../permute.h"

#include <ATen/Parallel.h>

#include <cstring>
#include <vector>

#include "capability.h"
#include "large_output.h"
#include "parts.h"

namespace moe_parallel {
namespace {

void check_slots(const Permute& task) {
  for (int64_t row = 0; row < task.rows; ++row) {
    TORCH_CHECK_INDEX(task.slots[row] < task.tokens * task.choices, "slot ", task.slots[row],
                      " lies beyond ", task.tokens, " tokens of ", task.choices, " slots");
  }
}

void copy_to(int64_t row, const Permute& task) {
  auto* target = static_cast<char*>(task.y) + row * task.y_stride;
  if (task.slots[row] < 0) {
    std::memset(target, 0, task.row_bytes);
  } else {
    const int64_t token = task.slots[row] / task.choices;
    std::memcpy(target, static_cast<const char*>(task.x) + token * task.x_stride, task.row_bytes);
  }
}

struct InverseMap {
  std::vector<int64_t> row_of_slot;  // negative if no row names the slot
  std::vector<int64_t> other_rows;   // padding, and rows whose slot an earlier row names
};

InverseMap invert(const Permute& task) {
  InverseMap map{std::vector<int64_t>(task.tokens * task.choices, -1), {}};
  for (int64_t row = 0; row < task.rows; ++row) {
    const int64_t slot = task.slots[row];
    if (slot < 0 || map.row_of_slot[slot] >= 0) {
      map.other_rows.push_back(row);
    } else {
      map.row_of_slot[slot] = row;
    }
  }
  return map;
}

}  // namespace

// If there are more rows than tokens, the copy goes token by token, so that x is read once and in
// order.
void run_on_cpu(const Permute& task) {
  check_slots(task);
  advise_huge_pages(task.y, task.rows * task.y_stride);
  if (task.rows <= task.tokens) {
    at::parallel_for(0, task.rows, grain_of(task.row_bytes), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) copy_to(row, task);
    });
    return;
  }
  const InverseMap map = invert(task);
  Permute by_token = task;
  by_token.past_caches = stores_past_caches(task.y, task.rows, task.row_bytes, task.y_stride);
  at::parallel_for(0, task.tokens, grain_of(task.choices * task.row_bytes),
                   [&](int64_t begin, int64_t end) {
                     kernels().permute(by_token, map.row_of_slot.data(), begin, end);
                   });
  for (const int64_t row : map.other_rows) copy_to(row, task);
}

}  // namespace moe_parallel
