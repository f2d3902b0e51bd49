// The gradients of SwiGLU's inputs, from dh in the accumulators.
#pragma once

#include "../../fused_product.h"
#include "swiglu_pairs.cuh"

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
    for_each_chunk<kGroups>(strip, column, [&](const Chunk& chunk) {
      Pairs dhs, gates, ups;
      round_chunk<Scalar>(dh, chunk, dhs);
      gate.read(chunk, gates);
      up.read(chunk, ups);
      const auto to = differentiate_pairs<Scalar>(prob_of(task.probs, chunk), dhs, gates, ups);
      dgate.write(chunk, to.dgates);
      dup.write(chunk, to.dups);
      h.write(chunk, to.h);
      write_prob_gradient(task.dprobs, chunk, strip.columns, to.dp);
    });
  }
};

}  // namespace moe_parallel::fused
