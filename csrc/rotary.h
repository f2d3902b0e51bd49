#pragma once

#include <cstdint>

#include "scalar_type.h"

#ifdef MOE_PARALLEL_CUDA
#include <cuda_runtime_api.h>
#endif

namespace moe_parallel {

// Rotates each pair (x[i], x[half + i]) of a head by an angle of its token.
struct Rotary {
  ScalarType type;  // of x and y
  const void* x;    // [length, batch, heads, 2 * half], with the strides below; columns are dense
  const void* angles;  // [length, batch, half] in the type of sums, with the strides below
  const void* cos;     // of the angles, with their strides; used on the CPU
  const void* sin;     // the same
  void* y;             // [length, batch, heads, 2 * half]
  int64_t length;
  int64_t batch;
  int64_t heads;
  int64_t half;
  int64_t place_stride, sequence_stride, head_stride;  // of x, in elements
  int64_t angles_place_stride, angles_sequence_stride;
  bool inverse;  // by the negative angles
};

void run_on_cpu(const Rotary& task);
#ifdef MOE_PARALLEL_CUDA
void run_on_cuda(const Rotary& task, cudaStream_t stream);
#endif

}  // namespace moe_parallel
