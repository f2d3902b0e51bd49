// The gradients of SwiGLU's inputs, from dh in the accumulators.
#pragma once

#include "../../fused_product.h"
#include "../swiglu.cuh"
#include "strip.cuh"

namespace moe_parallel::fused {

template <class Scalar>
struct Differentiate {
  static constexpr bool kSideBySide = true;
  DifferentiateRows task;

  template <int kGroups>
  __device__ void operator()(const Strip& strip, int64_t column,
                             const float (&dh)[kGroups][4]) const {
    const auto rows = [&](const void* data, int64_t stride) {
      return Rows<Scalar>(data, stride, strip.columns);
    };
    const auto gate = rows(task.gate, task.stride), up = rows(task.up, task.stride);
    const auto dgate = rows(task.dgate, task.dstride), dup = rows(task.dup, task.dstride);
    const auto h = rows(task.h, strip.columns);
    const int64_t chunks = (strip.columns + kChunk - 1) / kChunk;
    for_each_chunk<kGroups>(strip, column, [&](const Chunk& chunk) {
      const float p = task.probs && chunk.is_there ? task.probs[chunk.row] : 1.0f;
      Pairs gates, ups, dgates, dups, products;
      gate.read(chunk, gates);
      up.read(chunk, ups);
      float dp = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = dh[chunk.group + i] + 2 * chunk.half;
        const float2 d = unpack<Scalar>(pack<Scalar>(pair[0], pair[1]));
        const float2 g = unpack<Scalar>(gates[i]), u = unpack<Scalar>(ups[i]);
        const auto x = differentiate<Scalar>(p, d.x, g.x, u.x);
        const auto y = differentiate<Scalar>(p, d.y, g.y, u.y);
        dp += x.dp + y.dp;
        dgates[i] = pack<Scalar>(x.dgate, y.dgate);
        dups[i] = pack<Scalar>(x.dup, y.dup);
        products[i] = pack<Scalar>(x.h, y.h);
      }
      dgate.write(chunk, dgates);
      dup.write(chunk, dups);
      h.write(chunk, products);
      dp = sum_over_quad(dp);
      if (quad_lane() == 0 && chunk.is_there && chunk.column < strip.columns) {
        task.dprobs[chunk.row * chunks + chunk.column / kChunk] = dp;
      }
    });
  }
};

}  // namespace moe_parallel::fused
