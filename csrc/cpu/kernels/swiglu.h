#pragma once

#include "../../swiglu.h"
#include "vectors.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

// Both kernels prefetch the next row of all inputs and outputs. The hardware does not foresee it if
// there are gaps between rows, and a cache line must be read before it is written.

inline void swiglu(const Swiglu& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    for (int64_t row = begin; row < end; ++row) {
      const auto* gate = static_cast<const Scalar*>(task.gate) + row * task.gate_stride;
      const auto* up = static_cast<const Scalar*>(task.up) + row * task.up_stride;
      auto* h = static_cast<Scalar*>(task.h) + row * task.width;
      const Sum p = task.probs ? static_cast<const Sum*>(task.probs)[row] : Sum{1};
      for_columns<Sum>(task.width, [&](int64_t i, auto lanes) {
        prefetch<1>(gate + task.gate_stride + i);
        prefetch<1>(up + task.up_stride + i);
        prefetch<1>(h + task.width + i);
        const Vector<Sum> g = lanes.load(gate + i);
        lanes.store(h + i, p * g / (Sum{1} + exp(-g)) * lanes.load(up + i));
      });
    }
  });
}

inline void swiglu_backward(const SwigluBackward& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    for (int64_t row = begin; row < end; ++row) {
      const auto* dh = static_cast<const Scalar*>(task.dh) + row * task.width;
      const auto* gate = static_cast<const Scalar*>(task.gate) + row * task.gate_stride;
      const auto* up = static_cast<const Scalar*>(task.up) + row * task.up_stride;
      auto* dgate = static_cast<Scalar*>(task.dgate) + row * task.dgate_stride;
      auto* dup = static_cast<Scalar*>(task.dup) + row * task.dup_stride;
      auto* h = task.h ? static_cast<Scalar*>(task.h) + row * task.width : nullptr;
      const Sum p = task.probs ? static_cast<const Sum*>(task.probs)[row] : Sum{1};
      Vector<Sum> dp = {};
      for_columns<Sum>(task.width, [&](int64_t i, auto lanes) {
        prefetch<1>(dh + task.width + i);
        prefetch<1>(gate + task.gate_stride + i);
        prefetch<1>(up + task.up_stride + i);
        prefetch<1>(dgate + task.dgate_stride + i);
        prefetch<1>(dup + task.dup_stride + i);
        if (h) prefetch<1>(h + task.width + i);
        const Vector<Sum> g = lanes.load(gate + i), u = lanes.load(up + i), d = lanes.load(dh + i);
        const Vector<Sum> sigmoid = Sum{1} / (Sum{1} + exp(-g));
        const Vector<Sum> silu = g * sigmoid;
        dp += d * silu * u;
        lanes.store(dgate + i, p * d * u * sigmoid * (Sum{1} + g * (Sum{1} - sigmoid)));
        lanes.store(dup + i, p * d * silu);
        if (h) lanes.store(h + i, p * silu * u);
      });
      if (task.dprobs) {
        static_cast<Sum*>(task.dprobs)[row] = sum_of_lanes<Sum>(dp);
      }
    }
  });
}

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
