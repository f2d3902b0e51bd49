// The product itself.
#pragma once

#include "../../fused_product.h"
#include "strip.cuh"

namespace moe_parallel::fused {

template <class Scalar>
struct Store {
  static constexpr bool kSideBySide = true;
  StoreRows task;

  template <int kGroups>
  __device__ void operator()(const Strip& strip, int64_t column,
                             const float (&sums)[kGroups][4]) const {
    const Rows<Scalar> d(task.d, task.stride, strip.columns);
    for_each_chunk<kGroups>(strip, column, [&](const Chunk& chunk) {
      Pairs before = {};
      if (task.accumulate) d.read(chunk, before);
      Pairs after;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = sums[chunk.group + i] + 2 * chunk.half;
        const float2 old = unpack<Scalar>(before[i]);
        after[i] = pack<Scalar>(old.x + pair[0], old.y + pair[1]);
      }
      d.write(chunk, after);
    });
  }
};

}  // namespace moe_parallel::fused
