#pragma once

#include <cmath>

#include "../../softmax.h"
#include "vectors.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

// The largest number of a row. NaN aside: it shows in the sum.
template <class Scalar>
inline sum_t<Scalar> largest_of_row(const Scalar* x, int64_t width) {
  using Sum = sum_t<Scalar>;
  const Vector<Sum> least = broadcast(static_cast<Sum>(-HUGE_VAL));
  Vector<Sum> most = least;
  for_columns<Sum>(width, [&](int64_t i, auto lanes) {
    const auto is_inside = counted_from<Sum>(0) < static_cast<Sum>(width - i);
    most = larger_lanes<Sum>(most, is_inside ? lanes.load(x + i) : least);
  });
  return largest_of_lanes<Sum>(most);
}

// A row is read twice. The second time it is in the L1 or L2 cache.
inline void softmax_sums(const SoftmaxSums& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    for (int64_t row = begin; row < end; ++row) {
      const auto* x = static_cast<const Scalar*>(task.logits) + row * task.width;
      const Sum most = largest_of_row(x, task.width);
      Vector<Sum> sum = {};
      for_columns<Sum>(task.width, [&](int64_t i, auto lanes) {
        const auto is_inside = counted_from<Sum>(0) < static_cast<Sum>(task.width - i);
        sum += is_inside ? exp(lanes.load(x + i) - most) : Vector<Sum>{};
      });
      static_cast<Sum*>(task.most)[row] = most;
      static_cast<Sum*>(task.sums)[row] = sum_of_lanes<Sum>(sum);
    }
  });
}

inline void softmax_gradient(const SoftmaxGradient& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    for (int64_t row = begin; row < end; ++row) {
      auto* x = static_cast<Scalar*>(task.logits) + row * task.width;
      const Sum most = static_cast<const Sum*>(task.most)[row];
      const Sum share = Sum{1} / static_cast<const Sum*>(task.sums)[row];
      const auto softmax = [&](Vector<Sum> logits) { return exp(logits - most) * share; };
      const int64_t label = task.labels[row];
      const bool has_label = label >= 0 && label < task.width;
      const FirstLanes one{1};
      const Vector<Sum> of_label =
          has_label ? softmax(one.load(x + label)) - Sum{1} : Vector<Sum>{};
      for_columns<Sum>(task.width, [&](int64_t i, auto lanes) {
        lanes.store(x + i, softmax(lanes.load(x + i)));
      });
      if (has_label) one.store(x + label, of_label);
    }
  });
}

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
