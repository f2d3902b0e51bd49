// SwiGLU of the gate in the sums and of the up projection in memory.
#pragma once

#include "../../fused_product.h"
#include "../swiglu.cuh"
#include "strip.cuh"

namespace moe_parallel::fused {

template <class Scalar>
struct ActivateGate {
  static constexpr int kInputs = 1;
  ActivateGateRows task;

  __device__ void fetch(const Chunk& chunk, int64_t columns, uint4 (&inputs)[kInputs]) const {
    inputs[0] = Rows<Scalar>(task.up, columns, columns).fetch(chunk);
  }

  template <int kGroups>
  __device__ void operator()(const Chunk& chunk, int64_t columns, const float (&gate)[kGroups][4],
                             const uint4 (&inputs)[kInputs]) const {
    const float p = task.probs && chunk.is_there ? task.probs[chunk.row] : 1.0f;
    Pairs ups, products;
    pairs_of(inputs[0], ups);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = gate[chunk.group + i] + 2 * chunk.half;
      const float2 g = unpack<Scalar>(pack<Scalar>(pair[0], pair[1])), u = unpack<Scalar>(ups[i]);
      products[i] = pack<Scalar>(activate<Scalar>(p, g.x, u.x), activate<Scalar>(p, g.y, u.y));
    }
    Rows<Scalar>(task.h, columns, columns).write(chunk, products);
  }
};

}  // namespace moe_parallel::fused
