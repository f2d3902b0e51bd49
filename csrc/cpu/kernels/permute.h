#pragma once

#include "../../permute.h"
#include "vectors.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

// Copies one row to `kTargets` others: it is read once, however many there are.
template <int kTargets>
inline void copy_row(const char* source, char* const* targets, int64_t bytes) {
  using Bytes = Vector<uint8_t>;
  int64_t i = 0;
  for (; i + kVectorBytes <= bytes; i += kVectorBytes) {
    const auto block = read<Bytes>(source + i);
    for (int target = 0; target < kTargets; ++target) write(targets[target] + i, block);
  }
  for (int target = 0; target < kTargets; ++target) {
    std::memcpy(targets[target] + i, source + i, bytes - i);
  }
}

// Tokens begin..end to the rows that their slots have; row_of_slot is negative where none.
inline void permute(const Permute& task, const int64_t* row_of_slot, int64_t begin, int64_t end) {
  constexpr int kTargetsMax = 4;
  const auto* x = static_cast<const char*>(task.x);
  auto* y = static_cast<char*>(task.y);
  for (int64_t token = begin; token < end; ++token) {
    const char* source = x + token * task.row_bytes;
    char* targets[kTargetsMax];
    int count = 0;
    for (int64_t k = 0; k < task.choices; ++k) {
      const int64_t row = row_of_slot[token * task.choices + k];
      if (row >= 0) targets[count++] = y + row * task.row_bytes;
      if (count == kTargetsMax) {
        copy_row<kTargetsMax>(source, targets, task.row_bytes);
        count = 0;
      }
    }
    if (count == 3) copy_row<3>(source, targets, task.row_bytes);
    if (count == 2) copy_row<2>(source, targets, task.row_bytes);
    if (count == 1) copy_row<1>(source, targets, task.row_bytes);
  }
}

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
