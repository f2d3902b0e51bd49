#pragma once

#include "../../unpermute.h"
#include "vectors.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

// The row of the choice with the same index of the token kAhead later. It is negative if there is
// none.
template <int64_t kAhead, class Task>
inline int64_t next_row(const Task& task, int64_t choice) {
  const int64_t next = choice + kAhead * task.choices;
  return next < task.tokens * task.choices ? task.rows[next] : -1;
}

// Prefetches of the rows that are summed. Beside stores past the caches, which are AMD's, reads are
// the limit, and more of them are under way at a time if they end in the L2 cache.
template <class Lanes>
constexpr int64_t kSumsAhead = Lanes::kPastCaches ? 4 : 1;
template <class Lanes>
constexpr int kSumsWhere = Lanes::kPastCaches ? kToL2 : kToL1;

template <class Sum, class Task>
inline Sum prob_of(const Task& task, int64_t choice) {
  return task.probs ? static_cast<const Sum*>(task.probs)[choice] : Sum{1};
}

// Adds up the kRows rows of `choices`, which all exist. The rows of later tokens can be anywhere,
// so they are prefetched.
template <int kRows, class Scalar, class Lanes>
inline void sum_few_rows(const Unpermute& task, int64_t token, const int64_t* choices) {
  using Sum = sum_t<Scalar>;
  const auto* y = static_cast<const Scalar*>(task.y);
  auto* out = static_cast<Scalar*>(task.out) + token * task.out_stride;
  const Scalar* row[kRows];
  const Scalar* ahead[kRows];
  Sum prob[kRows];
  for (int j = 0; j < kRows; ++j) {
    const int64_t next = next_row<kSumsAhead<Lanes>>(task, choices[j]);
    row[j] = y + task.rows[choices[j]] * task.y_stride;
    ahead[j] = next < 0 ? row[j] : y + next * task.y_stride;
    prob[j] = prob_of<Sum>(task, choices[j]);
  }
  for_columns<Sum, Lanes>(task.width, [&](int64_t i, auto lanes) {
    Vector<Sum> sum = {};
    for (int j = 0; j < kRows; ++j) {
      prefetch<1, kSumsWhere<Lanes>>(ahead[j] + i);
      sum += prob[j] * lanes.load(row[j] + i);
    }
    lanes.store(out + i, sum);
  });
}

// Adds up any number of rows of one token, kVectors vectors of columns at a time.
template <int kVectors, class Scalar, class Lanes>
inline void sum_rows(const Unpermute& task, int64_t token, int64_t column, Lanes lanes) {
  using Sum = sum_t<Scalar>;
  const auto* y = static_cast<const Scalar*>(task.y) + column;
  auto* out = static_cast<Scalar*>(task.out) + token * task.out_stride + column;
  Vector<Sum> sums[kVectors] = {};
  if constexpr (!Lanes::kPastCaches) prefetch<kVectors>(out + task.out_stride);
  for (int64_t k = 0; k < task.choices; ++k) {
    const int64_t choice = token * task.choices + k;
    const int64_t row = task.rows[choice];
    if (row < 0) continue;
    const Sum prob = prob_of<Sum>(task, choice);
    const Scalar* source = y + row * task.y_stride;
    const int64_t next = next_row<kSumsAhead<Lanes>>(task, choice);
    if (next >= 0) prefetch<kVectors, kSumsWhere<Lanes>>(y + next * task.y_stride);
    for (int i = 0; i < kVectors; ++i) sums[i] += prob * lanes.load(source + i * kLanes<Sum>);
  }
  for (int i = 0; i < kVectors; ++i) lanes.store(out + i * kLanes<Sum>, sums[i]);
}

template <class Scalar, class Lanes>
inline void sum_many_rows(const Unpermute& task, int64_t token) {
  constexpr int64_t kLanesOfRow = kLanes<sum_t<Scalar>>;
  constexpr int kVectors = 4;
  int64_t i = 0;
  for (; i + kVectors * kLanesOfRow <= task.width; i += kVectors * kLanesOfRow) {
    sum_rows<kVectors, Scalar>(task, token, i, Lanes{});
  }
  for_columns<sum_t<Scalar>, Lanes>(task.width - i, [&](int64_t column, auto lanes) {
    sum_rows<1, Scalar>(task, token, i + column, lanes);
  });
}

// Few rows of a token are added up together. This was measured only for outputs that are stored
// past the caches.
template <class Scalar, class Lanes>
inline void sum_token(const Unpermute& task, int64_t token) {
  constexpr int64_t kFew = 4;
  if (!Lanes::kPastCaches || task.choices > kFew) return sum_many_rows<Scalar, Lanes>(task, token);
  int64_t choices[kFew];
  int count = 0;
  for (int64_t choice = token * task.choices; choice < (token + 1) * task.choices; ++choice) {
    if (task.rows[choice] >= 0) choices[count++] = choice;
  }
  if (count == 0) sum_many_rows<Scalar, Lanes>(task, token);
  if (count == 1) sum_few_rows<1, Scalar, Lanes>(task, token, choices);
  if (count == 2) sum_few_rows<2, Scalar, Lanes>(task, token, choices);
  if (count == 3) sum_few_rows<3, Scalar, Lanes>(task, token, choices);
  if (count == 4) sum_few_rows<4, Scalar, Lanes>(task, token, choices);
}

inline void unpermute(const Unpermute& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    with_stores(task.past_caches, [&](auto lanes) {
      for (int64_t token = begin; token < end; ++token) {
        sum_token<decltype(scalar), decltype(lanes)>(task, token);
      }
    });
  });
}

// Computes dy and dprobs for kRows rows of one token. The token's gradient is read once for all of
// them. The rows of a later token are prefetched.
template <int kRows, class Scalar, class Lanes>
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
    const int64_t next = next_row<Lanes::kPastCaches ? 2 : 1>(task, choices[j]);
    to_next[j] = next < 0 ? 0 : next * task.width - first;
    y[j] = static_cast<const Scalar*>(task.y) + first;
    dy[j] = static_cast<Scalar*>(task.dy) + first;
    probs[j] = static_cast<const Sum*>(task.probs)[choices[j]];
  }
  Vector<Sum> products[kRows] = {};
  for_columns<Sum, Lanes>(task.width, [&](int64_t i, auto lanes) {
    const Vector<Sum> d = lanes.load(dout + i);
    for (int j = 0; j < kRows; ++j) {
      prefetch<1>(y[j] + to_next[j] + i);
      if constexpr (!Lanes::kPastCaches) prefetch<1>(dy[j] + to_next[j] + i);
      products[j] += d * lanes.load(y[j] + i);
      lanes.store(dy[j] + i, probs[j] * d);
    }
  });
  auto* dprobs = static_cast<Sum*>(task.dprobs);
  for (int j = 0; j < kRows; ++j) dprobs[choices[j]] = sum_of_lanes<Sum>(products[j]);
}

template <class Scalar, class Lanes>
inline void differentiate_tokens(const UnpermuteBackward& task, int64_t begin, int64_t end) {
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
        differentiate_rows<kRowsMax, Scalar, Lanes>(task, token, choices);
        count = 0;
      }
    }
    if (count == 3) differentiate_rows<3, Scalar, Lanes>(task, token, choices);
    if (count == 2) differentiate_rows<2, Scalar, Lanes>(task, token, choices);
    if (count == 1) differentiate_rows<1, Scalar, Lanes>(task, token, choices);
  }
}

inline void unpermute_backward(const UnpermuteBackward& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    with_stores(task.past_caches, [&](auto lanes) {
      differentiate_tokens<decltype(scalar), decltype(lanes)>(task, begin, end);
    });
  });
}

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
