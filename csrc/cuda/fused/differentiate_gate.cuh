// The gradients of SwiGLU's inputs, from the gate in the sums and from dh and the up projection in
// memory.
#pragma once

#include "../../fused_product.h"
#include "swiglu_pairs.cuh"

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
    Pairs dhs, gates, ups;
    pairs_of(inputs[0], dhs);
    round_chunk<Scalar>(gate, chunk, gates);
    pairs_of(inputs[1], ups);
    const auto to = differentiate_pairs<Scalar>(prob_of(task.probs, chunk), dhs, gates, ups);
    rows(task.dgate).write(chunk, to.dgates);
    rows(task.dup).write(chunk, to.dups);
    rows(task.h).write(chunk, to.h);
    write_prob_gradient(task.dprobs, chunk, columns, to.dp);
  }
};

}  // namespace moe_parallel::fused
