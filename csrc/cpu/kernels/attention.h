#pragma once

#include <cmath>

#include "../attention_blocks.h"
#include "vectors.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

// The largest of the first `count` numbers, NaN aside: the weight of a NaN is NaN all the same.
template <class Sum>
inline Sum largest_of(const Sum* x, int64_t count) {
  constexpr int64_t kStep = kLanes<Sum>;
  const Vector<Sum> least = broadcast(static_cast<Sum>(-HUGE_VAL));
  Vector<Sum> most = least, also = least;
  int64_t i = 0;
  for (; i + 2 * kStep <= count; i += 2 * kStep) {
    most = larger_lanes<Sum>(most, load(x + i));
    also = larger_lanes<Sum>(also, load(x + i + kStep));
  }
  Sum largest = largest_of_lanes<Sum>(larger_lanes<Sum>(most, also));
  for (; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

// The weights of one query, of which it sees the first `seen` keys, and their sum.
template <class Scalar>
inline sum_t<Scalar> weights_of(const sum_t<Scalar>* scores, Scalar* weights, int64_t keys,
                                int64_t seen, sum_t<Scalar> scale, sum_t<Scalar> largest) {
  using Sum = sum_t<Scalar>;
  Vector<Sum> total = {};
  int64_t i = 0;
  for (; i + kLanes<Sum> <= seen; i += kLanes<Sum>) {
    const Vector<Sum> weight = exp(load(scores + i) * scale - largest);
    total += weight;
    store(weights + i, weight);
  }
  for (; i < keys; i += kLanes<Sum>) {
    Vector<Sum> weight = {};
    if (i < seen) {
      const auto is_seen = counted_from<Sum>(i) < static_cast<Sum>(seen);
      weight = is_seen ? exp(load(scores + i) * scale - largest) : weight;
    }
    total += weight;
    store(weights + i, weight);
  }
  return sum_of_lanes<Sum>(total);
}

inline void attention_weights(const AttentionWeights& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    const Sum scale = static_cast<Sum>(task.scale);
    for (int64_t row = begin; row < end; ++row) {
      const auto* scores = static_cast<const Sum*>(task.scores) + row * task.stride;
      auto* weights = static_cast<Scalar*>(task.weights) + row * task.stride;
      Sum& largest = static_cast<Sum*>(task.largest)[row];
      Sum& total = static_cast<Sum*>(task.total)[row];
      const int64_t all = task.seen + row, seen = all < task.keys ? all : task.keys;
      const Sum here = seen > 0 ? largest_of(scores, seen) * scale : static_cast<Sum>(-HUGE_VAL);
      const bool rises = task.is_first || here > largest;
      const Sum before = largest;
      if (rises) largest = here;
      const Sum sum = weights_of<Scalar>(scores, weights, task.keys, seen, scale, largest);
      if (task.is_first) {
        total = sum;
      } else if (!rises) {
        total += sum;
      } else {
        const Sum shrink = std::exp(before - largest);
        total = total * shrink + sum;
        auto* out = static_cast<Sum*>(task.out) + row * task.width;
        for_columns<Sum>(task.width, [&](int64_t i, auto lanes) {
          lanes.store(out + i, lanes.load(out + i) * shrink);
        });
      }
    }
  });
}

inline void attention_output(const AttentionOutput& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    for (int64_t row = begin; row < end; ++row) {
      const Sum total = static_cast<const Sum*>(task.total)[row];
      const auto* sum = static_cast<const Sum*>(task.sum) + row * task.width;
      auto* out = static_cast<Scalar*>(task.out) + row * task.out_stride;
      for_columns<Sum>(task.width, [&](int64_t i, auto lanes) {
        lanes.store(out + i, lanes.load(sum + i) / total);
      });
      static_cast<Sum*>(task.logsumexp)[row] =
          static_cast<const Sum*>(task.largest)[row] + std::log(total);
    }
  });
}

inline void attention_rows(const AttentionRows& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    const Sum scale = static_cast<Sum>(task.scale);
    for (int64_t row = begin; row < end; ++row) {
      const auto* from = static_cast<const Sum*>(task.from) + row * task.width;
      auto* to = static_cast<Scalar*>(task.to) + row * task.to_stride;
      for_columns<Sum>(task.width, [&](int64_t i, auto lanes) {
        lanes.store(to + i, lanes.load(from + i) * scale);
      });
    }
  });
}

inline void attention_dots(const AttentionDots& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    for (int64_t row = begin; row < end; ++row) {
      const auto* dout = static_cast<const Scalar*>(task.dout) + row * task.dout_stride;
      const auto* out = static_cast<const Scalar*>(task.out) + row * task.out_stride;
      Vector<Sum> sum = {};
      for_columns<Sum>(task.width, [&](int64_t i, auto lanes) {
        sum += lanes.load(dout + i) * lanes.load(out + i);
      });
      static_cast<Sum*>(task.dots)[row] = sum_of_lanes<Sum>(sum);
    }
  });
}

// The words of two rows of 16-bit numbers: the first row's in the lower half.
inline void pair_two_rows(const uint16_t* first, const uint16_t* second, uint32_t* words,
                          int64_t columns) {
  for (int64_t i = 0; i < columns; i += kLanes<uint32_t>) {
    write(words + i, pairs_of(first + i, second + i));
  }
}

template <class Scalar>
inline void score_gradient_of(const AttentionScoreGradient& task, int64_t key) {
  using Sum = sum_t<Scalar>;
  const Sum scale = static_cast<Sum>(task.scale);
  const int64_t at = key * task.stride, first = task.unseeing + key;
  const auto* scores = static_cast<const Sum*>(task.scores) + at;
  const auto* dweights = static_cast<const Sum*>(task.dweights) + at;
  const auto* logsumexp = static_cast<const Sum*>(task.logsumexp);
  const auto* dots = static_cast<const Sum*>(task.dots);
  auto* weights = static_cast<Scalar*>(task.weights) + at;
  auto* dscores = static_cast<Scalar*>(task.dscores) + at;
  int64_t i = 0;
  for (; i + kLanes<Sum> <= first && i < task.queries; i += kLanes<Sum>) {
    store(weights + i, Vector<Sum>{});
    store(dscores + i, Vector<Sum>{});
  }
  for (; i < task.queries; i += kLanes<Sum>) {
    Vector<Sum> weight = exp(load(scores + i) * scale - load(logsumexp + i));
    if (i < first) {
      weight = counted_from<Sum>(i) < static_cast<Sum>(first) ? Vector<Sum>{} : weight;
    }
    const Vector<Sum> dscore = weight * (load(dweights + i) - load(dots + i));
    store(weights + i, weight);
    store(dscores + i, dscore);
  }
}

inline void attention_score_gradient(const AttentionScoreGradient& task, int64_t begin,
                                     int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    for (int64_t pair = begin; pair < end; ++pair) {
      score_gradient_of<Scalar>(task, 2 * pair);
      score_gradient_of<Scalar>(task, 2 * pair + 1);
      if constexpr (sizeof(Scalar) == 2) {
        const auto* first = static_cast<const uint16_t*>(task.dscores) + 2 * pair * task.stride;
        pair_two_rows(first, first + task.stride,
                      static_cast<uint32_t*>(task.dscore_pairs) + pair * task.stride, task.queries);
      }
    }
  });
}

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
