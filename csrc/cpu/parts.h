// Divides the work of a kernel into parts, for as many threads as ATen has.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

#include "../scalar_type.h"
#include "capability.h"

namespace moe_parallel {

constexpr int64_t kElementsPerTask = 32768;  // as in ATen: smaller tasks do not repay a thread

// The number of rows that make a task large enough for a thread.
inline int64_t grain_of(int64_t elements_per_row) {
  return std::max<int64_t>(kElementsPerTask / std::max<int64_t>(elements_per_row, 1), 1);
}

template <class Task>
void in_parts(int64_t rows, int64_t elements_per_row, Kernel<Task> kernel, const Task& task) {
  at::parallel_for(0, rows, grain_of(elements_per_row),
                   [&](int64_t begin, int64_t end) { kernel(task, begin, end); });
}

inline int64_t bytes_of(ScalarType type) {
  switch (type) {
    case ScalarType::kFloat64:
      return 8;
    case ScalarType::kFloat32:
      return 4;
    case ScalarType::kBFloat16:
    case ScalarType::kFloat16:
      return 2;
  }
  return 0;
}

}  // namespace moe_parallel
