// Element types and launch sizes that the CUDA kernels share. Torch-free.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "../scalar_type.h"

namespace moe_parallel {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = int64_t{1} << 20;  // more items than that: kernels loop

// Blocks for so many items, each kernel striding over what is left.
inline int blocks_for(int64_t items, int64_t items_per_block) {
  return static_cast<int>(std::min((items + items_per_block - 1) / items_per_block, kMaxBlocks));
}

// body(Scalar{}) with the C++ type that the name stands for.
template <class Body>
void with_cuda_scalar(ScalarType type, const Body& body) {
  switch (type) {
    case ScalarType::kFloat32:
      return body(float{});
    case ScalarType::kFloat64:
      return body(double{});
    case ScalarType::kBFloat16:
      return body(__nv_bfloat16{});
  }
}

__device__ inline float to_sum(float x) { return x; }
__device__ inline double to_sum(double x) { return x; }
__device__ inline float to_sum(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class Scalar, class Sum>
__device__ inline Scalar from_sum(Sum x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 from_sum<__nv_bfloat16, float>(float x) {
  return __float2bfloat16_rn(x);
}

// The sum over the lanes of a warp, in a fixed order; lane 0 holds it.
template <class Sum>
__device__ inline Sum warp_sum(Sum x) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    x += __shfl_down_sync(0xffffffffu, x, offset);
  }
  return x;
}

}  // namespace moe_parallel
