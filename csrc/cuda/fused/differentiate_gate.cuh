// The gradients of SwiGLU's inputs, from the gate in the sums and from dh and the up projection in
// memory.
#pragma once

#include "../../fused_product.h"
#include "../swiglu.cuh"
#include "strip.cuh"

namespace moe_parallel::fused {

template <class Scalar>
struct DifferentiateGate {
  static constexpr int kInputs = 2;
  static_assert(kChunk == kColumnsOfSum);
  DifferentiateGateRows task;

  __device__ void fetch(const Chunk& chunk, int64_t columns, uint4 (&inputs)[kInputs]) const {
    inputs[0] = Rows<Scalar>(task.dh, columns, columns).fetch(chunk);
    inputs[1] = Rows<Scalar>(task.up, columns, columns).fetch(chunk);
  }

  template <int kGroups>
  __device__ void operator()(const Chunk& chunk, int64_t columns, const float (&gate)[kGroups][4],
                             const uint4 (&inputs)[kInputs]) const {
    const auto rows = [&](void* data) { return Rows<Scalar>(data, columns, columns); };
    const float p = task.probs && chunk.is_there ? task.probs[chunk.row] : 1.0f;
    Pairs dhs, ups, dgates, dups, products;
    pairs_of(inputs[0], dhs);
    pairs_of(inputs[1], ups);
    float dp = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = gate[chunk.group + i] + 2 * chunk.half;
      const float2 g = unpack<Scalar>(pack<Scalar>(pair[0], pair[1]));
      const float2 d = unpack<Scalar>(dhs[i]), u = unpack<Scalar>(ups[i]);
      const auto x = differentiate<Scalar>(p, d.x, g.x, u.x);
      const auto y = differentiate<Scalar>(p, d.y, g.y, u.y);
      dp += x.dp + y.dp;
      dgates[i] = pack<Scalar>(x.dgate, y.dgate);
      dups[i] = pack<Scalar>(x.dup, y.dup);
      products[i] = pack<Scalar>(x.h, y.h);
    }
    rows(task.dgate).write(chunk, dgates);
    rows(task.dup).write(chunk, dups);
    rows(task.h).write(chunk, products);
    dp = sum_over_quad(dp);
    if (quad_lane() == 0 && chunk.is_there && chunk.column < columns) {
      const int64_t chunks = (columns + kChunk - 1) / kChunk;
      task.dprobs[chunk.row * chunks + chunk.column / kChunk] = dp;
    }
  }
};

}  // namespace moe_parallel::fused
