// The element types that the CUDA kernels share. Torch-free.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../scalar_type.h"

namespace moe_parallel {

// Calls body(Scalar{}) with the C++ type for the enumerator.
template <class Body>
void with_cuda_scalar(ScalarType type, const Body& body) {
  switch (type) {
    case ScalarType::kFloat32:
      return body(float{});
    case ScalarType::kFloat64:
      return body(double{});
    case ScalarType::kBFloat16:
      return body(__nv_bfloat16{});
    case ScalarType::kFloat16:
      return body(__half{});
  }
}

__device__ inline float to_sum(float x) { return x; }
__device__ inline double to_sum(double x) { return x; }
__device__ inline float to_sum(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_sum(__half x) { return __half2float(x); }

template <class Scalar, class Sum>
__device__ inline Scalar from_sum(Sum x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 from_sum<__nv_bfloat16, float>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half from_sum<__half, float>(float x) {
  return __float2half_rn(x);
}

}  // namespace moe_parallel
