#include "../swiglu.h"
#include "reduce.cuh"
#include "vector.cuh"

namespace moe_parallel {
namespace {

// The errors of the fast exponential and division are smaller than the rounding of 16-bit elements.
template <class Scalar>
__device__ inline sum_t<Scalar> sigmoid(sum_t<Scalar> x) {
  if constexpr (sizeof(Scalar) == 2) {
    return __fdividef(1.0f, 1.0f + __expf(-x));
  } else {
    return 1 / (1 + exp(-x));
  }
}

template <class Scalar>
__device__ inline sum_t<Scalar> activate(sum_t<Scalar> p, sum_t<Scalar> gate, sum_t<Scalar> up) {
  return p * gate * sigmoid<Scalar>(gate) * up;
}

template <class Sum>
struct SwigluGradient {
  Sum dgate, dup, h;
  Sum dp;  // what this element adds to the gradient of the prob
};

template <class Scalar>
__device__ inline SwigluGradient<sum_t<Scalar>> differentiate(sum_t<Scalar> p, sum_t<Scalar> dh,
                                                              sum_t<Scalar> gate,
                                                              sum_t<Scalar> up) {
  const auto s = sigmoid<Scalar>(gate), silu = gate * s;
  return {.dgate = p * dh * up * s * (1 + gate * (1 - s)),
          .dup = p * dh * silu,
          .h = p * silu * up,
          .dp = dh * silu * up};
}

// One warp per row.
template <class Scalar, int kSize>
__global__ void activate_rows(Swiglu task) {
  using Sum = sum_t<Scalar>;
  const auto* probs = static_cast<const Sum*>(task.probs);
  for (int64_t row = first_warp(); row < task.rows; row += num_warps()) {
    const auto* gate = static_cast<const Scalar*>(task.gate) + row * task.gate_stride;
    const auto* up = static_cast<const Scalar*>(task.up) + row * task.up_stride;
    auto* h = static_cast<Scalar*>(task.h) + row * task.width;
    const Sum p = probs ? probs[row] : Sum{1};
#pragma unroll 2
    for (int64_t i = lane_index(); i < task.width / kSize; i += kWarp) {
      const auto gates = load<Scalar, kSize>(gate, i);
      const auto ups = load<Scalar, kSize>(up, i);
      Sum products[kSize];
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        products[j] = activate<Scalar>(p, to_sum(gates.elements[j]), to_sum(ups.elements[j]));
      }
      store(round_to<Scalar>(products), h, i);
    }
  }
}

// One warp per row. It sums the gradient of the row's prob.
template <class Scalar, int kSize>
__global__ void differentiate_rows(SwigluBackward task) {
  using Sum = sum_t<Scalar>;
  const auto* probs = static_cast<const Sum*>(task.probs);
  for (int64_t row = first_warp(); row < task.rows; row += num_warps()) {
    const auto* dh = static_cast<const Scalar*>(task.dh) + row * task.width;
    const auto* gate = static_cast<const Scalar*>(task.gate) + row * task.gate_stride;
    const auto* up = static_cast<const Scalar*>(task.up) + row * task.up_stride;
    auto* dgate = static_cast<Scalar*>(task.dgate) + row * task.dgate_stride;
    auto* dup = static_cast<Scalar*>(task.dup) + row * task.dup_stride;
    auto* h = task.h ? static_cast<Scalar*>(task.h) + row * task.width : nullptr;
    const Sum p = probs ? probs[row] : Sum{1};
    Sum dp = 0;
    for (int64_t i = lane_index(); i < task.width / kSize; i += kWarp) {
      const auto d = load<Scalar, kSize>(dh, i);
      const auto gates = load<Scalar, kSize>(gate, i);
      const auto ups = load<Scalar, kSize>(up, i);
      Sum dgates[kSize], dups[kSize], products[kSize];
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const auto gradient = differentiate<Scalar>(
            p, to_sum(d.elements[j]), to_sum(gates.elements[j]), to_sum(ups.elements[j]));
        dp += gradient.dp;
        dgates[j] = gradient.dgate;
        dups[j] = gradient.dup;
        products[j] = gradient.h;
      }
      store(round_to<Scalar>(dgates), dgate, i);
      store(round_to<Scalar>(dups), dup, i);
      if (h) store(round_to<Scalar>(products), h, i);
    }
    if (!task.dprobs) continue;
    dp = sum_over_lanes(dp);
    if (lane_index() == 0) static_cast<Sum*>(task.dprobs)[row] = dp;
  }
}

}  // namespace

void run_on_cuda(const Swiglu& task, cudaStream_t stream) {
  if (task.rows == 0 || task.width == 0) return;
  with_vectors(task.type, {task.gate, task.up, task.h},
               {task.width, task.gate_stride, task.up_stride}, [&](auto scalar, auto size) {
                 launch_kernel(activate_rows<decltype(scalar), size()>,
                               blocks_for(task.rows, kWarpsPerBlock), stream, task);
               });
}

void run_on_cuda(const SwigluBackward& task, cudaStream_t stream) {
  if (task.rows == 0) return;
  with_vectors(task.type, {task.dh, task.gate, task.up, task.dgate, task.dup, task.h},
               {task.width, task.gate_stride, task.up_stride, task.dgate_stride, task.dup_stride},
               [&](auto scalar, auto size) {
                 launch_kernel(differentiate_rows<decltype(scalar), size()>,
                               blocks_for(task.rows, kWarpsPerBlock), stream, task);
               });
}

}  // namespace moe_parallel
