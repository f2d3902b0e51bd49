// SwiGLU of the gate in the sums and of the up projection in memory.
#pragma once

#include "../../fused_product.h"
#include "swiglu_pairs.cuh"

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
    Pairs gates, ups, products;
    round_chunk<Scalar>(gate, chunk, gates);
    pairs_of(inputs[0], ups);
    activate_pairs<Scalar>(prob_of(task.probs, chunk), gates, ups, products);
    Rows<Scalar>(task.h, columns, columns).write(chunk, products);
  }
};

}  // namespace moe_parallel::fused
