#pragma once

#include "../../permute.h"
#include "vectors.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

// The destination of a row, and that of the next token's row, whose cache lines are prefetched. A
// line must be read before it is written, and the hardware does not foresee scattered rows.
struct Target {
  char* row;
  char* ahead;
};

// Copies one row to `kTargets` other rows. It is read once, however many targets there are.
template <int kTargets, bool kPastCaches>
inline void copy_row(const char* source, const Target* targets, int64_t bytes) {
  int64_t i = 0;
  for (; i + kCacheLine <= bytes; i += kCacheLine) {
    if constexpr (!kPastCaches) {
      for (int t = 0; t < kTargets; ++t) __builtin_prefetch(targets[t].ahead + i, /*to write=*/1);
    }
    for (int64_t j = i; j < i + kCacheLine; j += kRegisterBytes) {
      const auto block = read<Vector<uint8_t>>(source + j);
      for (int t = 0; t < kTargets; ++t) {
        if constexpr (kPastCaches) {
          stream(targets[t].row + j, block);
        } else {
          write(targets[t].row + j, block);
        }
      }
    }
  }
  for (int t = 0; t < kTargets; ++t) std::memcpy(targets[t].row + i, source + i, bytes - i);
}

template <bool kPastCaches>
inline void copy_tokens(const Permute& task, const int64_t* row_of_slot, int64_t begin,
                        int64_t end) {
  constexpr int kTargetsMax = 4;
  const auto* x = static_cast<const char*>(task.x);
  auto* y = static_cast<char*>(task.y);
  for (int64_t token = begin; token < end; ++token) {
    const char* source = x + token * task.x_stride;
    const int64_t to_next = token + 1 < end ? task.choices : 0;
    Target targets[kTargetsMax];
    int count = 0;
    for (int64_t slot = token * task.choices; slot < (token + 1) * task.choices; ++slot) {
      const int64_t row = row_of_slot[slot], next = row_of_slot[slot + to_next];
      if (row < 0) continue;
      targets[count++] = {y + row * task.y_stride, y + (next < 0 ? row : next) * task.y_stride};
      if (count == kTargetsMax) {
        copy_row<kTargetsMax, kPastCaches>(source, targets, task.row_bytes);
        count = 0;
      }
    }
    if (count == 3) copy_row<3, kPastCaches>(source, targets, task.row_bytes);
    if (count == 2) copy_row<2, kPastCaches>(source, targets, task.row_bytes);
    if (count == 1) copy_row<1, kPastCaches>(source, targets, task.row_bytes);
  }
}

// Copies the tokens begin..end to the rows of their slots. row_of_slot is negative for a slot
// without a row.
inline void permute(const Permute& task, const int64_t* row_of_slot, int64_t begin, int64_t end) {
  if (!task.past_caches) return copy_tokens<false>(task, row_of_slot, begin, end);
  copy_tokens<true>(task, row_of_slot, begin, end);
  end_stream();
}

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
