#pragma once

#include "../../swiglu.h"
#include "vectors.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

// silu(gate) up p
template <class Sum>
inline Vector<Sum> activated(Sum p, Vector<Sum> gate, Vector<Sum> up) {
  return p * gate / (Sum{1} + exp(-gate)) * up;
}

// The gradients of gate and up, h, and the terms of the gradient of p.
template <class Sum>
struct Differentiated {
  Vector<Sum> dgate, dup, h, dp;
};

template <class Sum>
inline Differentiated<Sum> differentiated(Sum p, Vector<Sum> dh, Vector<Sum> gate, Vector<Sum> up) {
  const Vector<Sum> sigmoid = Sum{1} / (Sum{1} + exp(-gate));
  const Vector<Sum> silu = gate * sigmoid;
  return {.dgate = p * dh * up * sigmoid * (Sum{1} + gate * (Sum{1} - sigmoid)),
          .dup = p * dh * silu,
          .h = p * silu * up,
          .dp = dh * silu * up};
}

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
        lanes.store(h + i, activated<Sum>(p, lanes.load(gate + i), lanes.load(up + i)));
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
        const auto of =
            differentiated<Sum>(p, lanes.load(dh + i), lanes.load(gate + i), lanes.load(up + i));
        dp += of.dp;
        lanes.store(dgate + i, of.dgate);
        lanes.store(dup + i, of.dup);
        if (h) lanes.store(h + i, of.h);
      });
      if (task.dprobs) {
        static_cast<Sum*>(task.dprobs)[row] = sum_of_lanes<Sum>(dp);
      }
    }
  });
}

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
