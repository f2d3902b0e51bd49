// SwiGLU of the gate in `first` and the up projection in `second`.
#pragma once

#include "../../fused_product.h"
#include "swiglu_pairs.cuh"

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
      Pairs gates, ups, products;
      round_chunk<Scalar>(first, chunk, gates);
      round_chunk<Scalar>(second, chunk, ups);
      activate_pairs<Scalar>(prob_of(task.probs, chunk), gates, ups, products);
      h.write(chunk, products);
      kept_gate.write(chunk, gates);
      kept_up.write(chunk, ups);
    });
  }
};

}  // namespace moe_parallel::fused
