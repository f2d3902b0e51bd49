#include "../unpermute.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "loops.h"

namespace moe_parallel {
namespace {

constexpr int64_t kColumns = 1024;  // the sums of so many columns stay in the L1 cache

template <class Task>
int64_t row_of(const Task& task, int64_t choice) {
  const int64_t row = task.rows[choice];
  TORCH_CHECK_INDEX(row < task.num_rows, "row ", row, " lies beyond ", task.num_rows, " rows");
  return row;
}

template <class Scalar>
void sum_rows_of_token(const Unpermute& task, int64_t token) {
  using Sum = sum_t<Scalar>;
  const auto* y = static_cast<const Scalar*>(task.y);
  const auto* gates = static_cast<const Sum*>(task.gates);
  auto* out = static_cast<Scalar*>(task.out) + token * task.width;
  Sum sums[kColumns];
  for (int64_t column = 0; column < task.width; column += kColumns) {
    const int64_t columns = std::min(kColumns, task.width - column);
    std::fill_n(sums, columns, Sum{0});
    for (int64_t k = 0; k < task.choices; ++k) {
      const int64_t choice = token * task.choices + k;
      const int64_t row = row_of(task, choice);
      if (row < 0) continue;
      add_scaled(y + row * task.width + column, gates ? gates[choice] : Sum{1}, sums, columns);
    }
    for (int64_t i = 0; i < columns; ++i) out[column + i] = static_cast<Scalar>(sums[i]);
  }
}

template <class Scalar>
void spread_gradient_of_token(const UnpermuteBackward& task, int64_t token) {
  using Sum = sum_t<Scalar>;
  const auto* y = static_cast<const Scalar*>(task.y);
  const auto* gates = static_cast<const Sum*>(task.gates);
  const auto* dout = static_cast<const Scalar*>(task.dout) + token * task.width;
  auto* dy = static_cast<Scalar*>(task.dy);
  auto* dgates = static_cast<Sum*>(task.dgates);
  for (int64_t k = 0; k < task.choices; ++k) {
    const int64_t choice = token * task.choices + k;
    const int64_t row = row_of(task, choice);
    if (row < 0) {
      dgates[choice] = 0;
      continue;
    }
    scale(dout, gates[choice], dy + row * task.width, task.width);
    dgates[choice] = dot(y + row * task.width, dout, task.width);
  }
}

}  // namespace

void run_on_cpu(const Unpermute& task) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const int64_t grain = grain_of(task.choices * task.width);
    at::parallel_for(0, task.tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) sum_rows_of_token<Scalar>(task, token);
    });
  });
}

void run_on_cpu(const UnpermuteBackward& task) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const int64_t grain = grain_of(task.choices * task.width);
    at::parallel_for(0, task.tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        spread_gradient_of_token<Scalar>(task, token);
      }
    });
    auto* dy = static_cast<Scalar*>(task.dy);
    for (int64_t row = 0; row < task.num_rows; ++row) {
      if (task.slots[row] < 0) std::fill_n(dy + row * task.width, task.width, Scalar{});
    }
  });
}

}  // namespace moe_parallel
