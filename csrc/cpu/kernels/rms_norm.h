#pragma once

#include <algorithm>
#include <cmath>

#include "../../rms_norm.h"
#include "vectors.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

// A row is read twice. The second time it is in the L1 cache.
inline void rms_norm(const RmsNorm& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    const auto* weight = static_cast<const Sum*>(task.weight);
    for (int64_t row = begin; row < end; ++row) {
      const auto* x = static_cast<const Scalar*>(task.x) + row * task.width;
      auto* y = static_cast<Scalar*>(task.y) + row * task.width;
      Vector<Sum> squares = {};
      for_columns<Sum>(task.width, [&](int64_t i, auto lanes) {
        const Vector<Sum> v = lanes.load(x + i);
        squares += v * v;
      });
      const Sum mean = sum_of_lanes<Sum>(squares) / static_cast<Sum>(task.width);
      const Sum r = Sum{1} / std::sqrt(mean + static_cast<Sum>(task.eps));
      static_cast<Sum*>(task.r)[row] = r;
      for_columns<Sum>(task.width, [&](int64_t i, auto lanes) {
        lanes.store(y + i, lanes.load(x + i) * r * lanes.load(weight + i));
      });
    }
  });
}

// Computes the parts begin..end.
inline void rms_norm_backward(const RmsNormBackward& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    const auto* weight = static_cast<const Sum*>(task.weight);
    for (int64_t part = begin; part < end; ++part) {
      auto* dweight = static_cast<Sum*>(task.dweights) + part * task.width;
      std::fill_n(dweight, task.width, Sum{0});
      const int64_t last = std::min((part + 1) * kRmsNormRows, task.rows);
      for (int64_t row = part * kRmsNormRows; row < last; ++row) {
        const auto* dy = static_cast<const Scalar*>(task.dy) + row * task.width;
        const auto* x = static_cast<const Scalar*>(task.x) + row * task.width;
        auto* dx = static_cast<Scalar*>(task.dx) + row * task.width;
        const Sum r = static_cast<const Sum*>(task.r)[row];
        Vector<Sum> products = {};
        for_columns<Sum>(task.width, [&](int64_t i, auto lanes) {
          const Vector<Sum> d_z = lanes.load(dy + i) * (lanes.load(x + i) * r);
          lanes.store(dweight + i, lanes.load(dweight + i) + d_z);
          products += d_z * lanes.load(weight + i);
        });
        const Sum mean = sum_of_lanes<Sum>(products) / static_cast<Sum>(task.width);
        for_columns<Sum>(task.width, [&](int64_t i, auto lanes) {
          const Vector<Sum> z = lanes.load(x + i) * r;
          lanes.store(dx + i, (lanes.load(dy + i) * lanes.load(weight + i) - z * mean) * r);
        });
      }
    }
  });
}

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
