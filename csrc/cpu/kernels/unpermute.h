#pragma once

#include "../../unpermute.h"
#include "vectors.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

// The row of the next token's choice with the same index. It is negative if there is none.
template <class Task>
inline int64_t next_row(const Task& task, int64_t choice) {
  const int64_t next = choice + task.choices;
  return next < task.tokens * task.choices ? task.rows[next] : -1;
}

// Adds up the rows of one token in registers, kVectors vectors of columns at a time. The rows of
// the next token can be anywhere, so they are prefetched.
template <int kVectors, class Scalar, class Lanes>
inline void sum_rows(const Unpermute& task, int64_t token, int64_t column, Lanes lanes) {
  using Sum = sum_t<Scalar>;
  const auto* y = static_cast<const Scalar*>(task.y) + column;
  const auto* probs = static_cast<const Sum*>(task.probs);
  auto* out = static_cast<Scalar*>(task.out) + token * task.width + column;
  Vector<Sum> sums[kVectors] = {};
  prefetch<kVectors>(out + task.width);
  for (int64_t k = 0; k < task.choices; ++k) {
    const int64_t choice = token * task.choices + k;
    const int64_t row = task.rows[choice];
    if (row < 0) continue;
    const Sum prob = probs ? probs[choice] : Sum{1};
    const Scalar* source = y + row * task.width;
    const int64_t next = next_row(task, choice);
    if (next >= 0) prefetch<kVectors>(y + next * task.width);
    for (int i = 0; i < kVectors; ++i) sums[i] += prob * lanes.load(source + i * kLanes<Sum>);
  }
  for (int i = 0; i < kVectors; ++i) lanes.store(out + i * kLanes<Sum>, sums[i]);
}

inline void unpermute(const Unpermute& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    constexpr int64_t kLanesOfRow = kLanes<sum_t<Scalar>>;
    constexpr int kVectors = 4;
    for (int64_t token = begin; token < end; ++token) {
      int64_t i = 0;
      for (; i + kVectors * kLanesOfRow <= task.width; i += kVectors * kLanesOfRow) {
        sum_rows<kVectors, Scalar>(task, token, i, AllLanes{});
      }
      for_columns<sum_t<Scalar>>(task.width - i, [&](int64_t column, auto lanes) {
        sum_rows<1, Scalar>(task, token, i + column, lanes);
      });
    }
  });
}

// Computes dy and dprobs for kRows rows of one token. The token's gradient is read once for all of
// them. The rows of the next token are prefetched.
template <int kRows, class Scalar>
inline void differentiate_rows(const UnpermuteBackward& task, int64_t token,
                               const int64_t* choices) {
  using Sum = sum_t<Scalar>;
  const auto* dout = static_cast<const Scalar*>(task.dout) + token * task.width;
  const Scalar* y[kRows];
  Scalar* dy[kRows];
  int64_t to_next[kRows];
  Sum probs[kRows];
  for (int j = 0; j < kRows; ++j) {
    const int64_t first = task.rows[choices[j]] * task.width;
    const int64_t next = next_row(task, choices[j]);
    to_next[j] = next < 0 ? 0 : next * task.width - first;
    y[j] = static_cast<const Scalar*>(task.y) + first;
    dy[j] = static_cast<Scalar*>(task.dy) + first;
    probs[j] = static_cast<const Sum*>(task.probs)[choices[j]];
  }
  Vector<Sum> products[kRows] = {};
  for_columns<Sum>(task.width, [&](int64_t i, auto lanes) {
    const Vector<Sum> d = lanes.load(dout + i);
    for (int j = 0; j < kRows; ++j) {
      prefetch<1>(y[j] + to_next[j] + i);
      prefetch<1>(dy[j] + to_next[j] + i);
      products[j] += d * lanes.load(y[j] + i);
      lanes.store(dy[j] + i, probs[j] * d);
    }
  });
  auto* dprobs = static_cast<Sum*>(task.dprobs);
  for (int j = 0; j < kRows; ++j) dprobs[choices[j]] = sum_of_lanes<Sum>(products[j]);
}

inline void unpermute_backward(const UnpermuteBackward& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    constexpr int kRowsMax = 4;
    auto* dprobs = static_cast<sum_t<Scalar>*>(task.dprobs);
    for (int64_t token = begin; token < end; ++token) {
      int64_t choices[kRowsMax];
      int count = 0;
      for (int64_t choice = token * task.choices; choice < (token + 1) * task.choices; ++choice) {
        if (task.rows[choice] < 0) {
          dprobs[choice] = 0;
        } else {
          choices[count++] = choice;
        }
        if (count == kRowsMax) {
          differentiate_rows<kRowsMax, Scalar>(task, token, choices);
          count = 0;
        }
      }
      if (count == 3) differentiate_rows<3, Scalar>(task, token, choices);
      if (count == 2) differentiate_rows<2, Scalar>(task, token, choices);
      if (count == 1) differentiate_rows<1, Scalar>(task, token, choices);
    }
  });
}

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
