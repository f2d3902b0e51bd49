// Sums of squares of 32 columns each, and on request the product itself.
#pragma once

#include "../../fused_product.h"
#include "strip.cuh"

namespace moe_parallel::fused {

template <class Scalar>
struct Square {
  static constexpr bool kSideBySide = true;
  static_assert(kChunk == kColumnsOfSum);
  SquareRows task;

  template <int kGroups>
  __device__ void operator()(const Strip& strip, int64_t column,
                             const float (&sums)[kGroups][4]) const {
    const Rows<Scalar> c(task.c, strip.columns, strip.columns);
    for_each_chunk<kGroups>(strip, column, [&](const Chunk& chunk) {
      Pairs pairs;
      float square = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = sums[chunk.group + i] + 2 * chunk.half;
        square += pair[0] * pair[0] + pair[1] * pair[1];
        pairs[i] = pack<Scalar>(pair[0], pair[1]);
      }
      square = sum_over_quad(square);
      if (quad_lane() == 0 && chunk.is_there && chunk.column < strip.columns) {
        task.squares[(chunk.row * strip.columns + chunk.column) / kChunk] = square;
      }
      if (c.is_wanted()) c.write(chunk, pairs);
    });
  }
};

}  // namespace moe_parallel::fused
