// Sums over lanes in a fixed order, so that every run gives the same bits.
#pragma once

#include "launch.cuh"

namespace moe_parallel {

// The number of lanes that share a row of `vectors` vectors. It is a power of two, so that several
// short rows fill a warp.
inline int lanes_for(int64_t vectors) {
  int lanes = 1;
  while (lanes < kWarp && lanes < vectors) lanes *= 2;
  return lanes;
}

// The sum over each group of `lanes` consecutive lanes, a power of two. The first lane of the group
// holds it.
template <class Sum>
__device__ inline Sum sum_over_lanes(Sum x, int lanes = kWarp) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    x += __shfl_down_sync(kAllLanes, x, offset, lanes);
  }
  return x;
}

// The inclusive prefix sum: the sum over the lanes up to this one.
template <class Sum>
__device__ inline Sum sum_up_to_lane(Sum x) {
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const Sum other = __shfl_up_sync(kAllLanes, x, offset);
    if (lane_index() >= offset) x += other;
  }
  return x;
}

// The sum over the threads of a block; thread 0 holds it. All threads must call it.
template <class Sum>
__device__ inline Sum sum_over_block(Sum x) {
  __shared__ Sum of_warps[kWarpsPerBlock];
  x = sum_over_lanes(x);
  __syncthreads();  // the sums of an earlier call have been read
  if (lane_index() == 0) of_warps[warp_in_block()] = x;
  __syncthreads();
  Sum sum = 0;
  for (int warp = 0; warp < kWarpsPerBlock; ++warp) sum += of_warps[warp];
  return sum;
}

}  // namespace moe_parallel
