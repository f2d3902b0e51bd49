#pragma once

#include "../../rotary.h"
#include "vectors.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

// Rotates the heads of the tokens begin..end.
inline void rotary(const Rotary& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    const Sum sign = static_cast<Sum>(task.inverse ? -1 : 1);
    for (int64_t token = begin; token < end; ++token) {
      const int64_t place = token / task.batch, sequence = token % task.batch;
      const int64_t of_token =
          place * task.angles_place_stride + sequence * task.angles_sequence_stride;
      const auto* cos = static_cast<const Sum*>(task.cos) + of_token;
      const auto* sin = static_cast<const Sum*>(task.sin) + of_token;
      for (int64_t head = 0; head < task.heads; ++head) {
        const auto* x = static_cast<const Scalar*>(task.x) + place * task.place_stride +
                        sequence * task.sequence_stride + head * task.head_stride;
        auto* y = static_cast<Scalar*>(task.y) + (token * task.heads + head) * 2 * task.half;
        for_columns<Sum>(task.half, [&](int64_t i, auto lanes) {
          const Vector<Sum> c = lanes.load(cos + i), s = sign * lanes.load(sin + i);
          const Vector<Sum> first = lanes.load(x + i), second = lanes.load(x + task.half + i);
          lanes.store(y + i, first * c - second * s);
          lanes.store(y + task.half + i, second * c + first * s);
        });
      }
    }
  });
}

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
