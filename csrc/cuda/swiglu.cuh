// SwiGLU of one element, and its gradients. All kernels use these functions, so that they give the
// same bits.
#pragma once

#include "scalar.cuh"

namespace moe_parallel {

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

}  // namespace moe_parallel
