// SwiGLU of the gate in `first` and the up projection in `second`.
#pragma once

#include "../../fused_product.h"
#include "../swiglu.cuh"
#include "strip.cuh"

namespace moe_parallel::fused {

template <class Scalar>
struct Activate {
  static constexpr bool kSideBySide = false;
  ActivateRows task;

  template <int kGroups>
  __device__ void operator()(const Strip& strip, const float (&first)[kGroups][4],
                             const float (&second)[kGroups][4]) const {
    const Rows<Scalar> h(task.h, strip.columns, strip.columns);
    const Rows<Scalar> kept_gate(task.gate, task.stride, strip.columns);
    const Rows<Scalar> kept_up(task.up, task.stride, strip.columns);
    for_each_chunk<kGroups>(strip, strip.first_column, [&](const Chunk& chunk) {
      const float p = task.probs && chunk.is_there ? task.probs[chunk.row] : 1.0f;
      Pairs gates, ups, products;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int group = chunk.group + i, j = 2 * chunk.half;
        gates[i] = pack<Scalar>(first[group][j], first[group][j + 1]);
        ups[i] = pack<Scalar>(second[group][j], second[group][j + 1]);
        const float2 g = unpack<Scalar>(gates[i]), u = unpack<Scalar>(ups[i]);
        products[i] = pack<Scalar>(activate<Scalar>(p, g.x, u.x), activate<Scalar>(p, g.y, u.y));
      }
      h.write(chunk, products);
      kept_gate.write(chunk, gates);
      kept_up.write(chunk, ups);
    });
  }
};

}  // namespace moe_parallel::fused
