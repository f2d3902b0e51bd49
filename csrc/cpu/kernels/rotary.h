#pragma once

#include <cstring>

#include "../../rotary.h"
#include "vectors.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

// Calls body(x, y) with the address of each head of one kind.
template <class Scalar, class Body>
inline void for_heads(const Heads& heads, int64_t place, int64_t sequence, const Body& body) {
  const auto offset = [&](const HeadStrides& strides, int64_t group, int64_t head) {
    return place * strides.place + sequence * strides.sequence + group * strides.group +
           head * strides.head;
  };
  for (int64_t group = 0; group < heads.groups; ++group) {
    for (int64_t head = 0; head < heads.per_group; ++head) {
      body(static_cast<const Scalar*>(heads.x) + offset(heads.of_x, group, head),
           static_cast<Scalar*>(heads.y) + offset(heads.of_y, group, head));
    }
  }
}

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
      const auto rotate = [&](const Scalar* x, Scalar* y) {
        for_columns<Sum>(task.half, [&](int64_t i, auto lanes) {
          const Vector<Sum> c = lanes.load(cos + i), s = sign * lanes.load(sin + i);
          const Vector<Sum> first = lanes.load(x + i), second = lanes.load(x + task.half + i);
          lanes.store(y + i, first * c - second * s);
          lanes.store(y + task.half + i, second * c + first * s);
        });
      };
      const auto copy = [&](const Scalar* x, Scalar* y) {
        std::memcpy(y, x, 2 * task.half * sizeof(Scalar));
      };
      for (int kind = 0; kind < task.kinds; ++kind) {
        const Heads& heads = task.heads[kind];
        if (heads.are_rotated) {
          for_heads<Scalar>(heads, place, sequence, rotate);
        } else {
          for_heads<Scalar>(heads, place, sequence, copy);
        }
      }
    }
  });
}

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
