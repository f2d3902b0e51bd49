#pragma once

#include <cstdint>

#include "scalar_type.h"

#ifdef MOE_PARALLEL_CUDA
#include <cuda_runtime_api.h>
#endif

namespace moe_parallel {

// Where the heads of a tensor [length, batch, groups, heads of a group, 2 * half] are, in elements.
// The columns of a head are dense.
struct HeadStrides {
  int64_t place, sequence, group, head;

  // A multiple of a power of two if all strides are.
  int64_t joint() const { return place | sequence | group | head; }
};

// Heads that are read from x and written to y.
struct Heads {
  const void* x;
  void* y;
  HeadStrides of_x, of_y;
  int64_t groups;
  int64_t per_group;
  bool are_rotated;  // otherwise they are copied

  int64_t count() const { return groups * per_group; }
};

// Rotates each pair (x[i], x[half + i]) of a head by an angle of its token.
struct Rotary {
  static constexpr int kMost = 3;  // queries, keys and values

  ScalarType type;     // of x and y
  Heads heads[kMost];  // zeros if there are fewer kinds
  int kinds;           // of heads
  const void* angles;  // [length, batch, half] in the type of sums, with the strides below
  const void* cos;     // of the angles, with their strides; used on the CPU
  const void* sin;     // the same
  int64_t angles_place_stride, angles_sequence_stride;
  int64_t length;
  int64_t batch;
  int64_t half;
  bool inverse;  // by the negative angles

  int64_t heads_of_token() const {
    int64_t count = 0;
    for (int kind = 0; kind < kinds; ++kind) count += heads[kind].count();
    return count;
  }
};

void run_on_cpu(const Rotary& task);
#ifdef MOE_PARALLEL_CUDA
void run_on_cuda(const Rotary& task, cudaStream_t stream);
#endif

}  // namespace moe_parallel
