// SwiGLU of one chunk, and its gradients, on the pairs of 16-bit elements that a lane holds. All
// epilogues use these functions, wherever the pairs come from.
#pragma once

#include "../swiglu.cuh"
#include "strip.cuh"

namespace moe_parallel::fused {

// The prob of a chunk's row; without probs 1.
__device__ inline float prob_of(const float* probs, const Chunk& chunk) {
  return probs && chunk.is_there ? probs[chunk.row] : 1.0f;
}

// A chunk of an accumulator, rounded.
template <class Scalar, int kGroups>
__device__ inline void round_chunk(const float (&sums)[kGroups][4], const Chunk& chunk,
                                   Pairs& pairs) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* pair = sums[chunk.group + i] + 2 * chunk.half;
    pairs[i] = pack<Scalar>(pair[0], pair[1]);
  }
}

template <class Scalar>
__device__ inline void activate_pairs(float p, const Pairs& gates, const Pairs& ups, Pairs& h) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 g = unpack<Scalar>(gates[i]), u = unpack<Scalar>(ups[i]);
    h[i] = pack<Scalar>(activate<Scalar>(p, g.x, u.x), activate<Scalar>(p, g.y, u.y));
  }
}

struct PairGradients {
  Pairs dgates, dups, h;
  float dp = 0;  // what the lane's pairs add to the gradient of the prob
};

template <class Scalar>
__device__ inline PairGradients differentiate_pairs(float p, const Pairs& dhs, const Pairs& gates,
                                                    const Pairs& ups) {
  PairGradients to;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 d = unpack<Scalar>(dhs[i]), g = unpack<Scalar>(gates[i]);
    const float2 u = unpack<Scalar>(ups[i]);
    const auto x = differentiate<Scalar>(p, d.x, g.x, u.x);
    const auto y = differentiate<Scalar>(p, d.y, g.y, u.y);
    to.dp += x.dp + y.dp;
    to.dgates[i] = pack<Scalar>(x.dgate, y.dgate);
    to.dups[i] = pack<Scalar>(x.dup, y.dup);
    to.h[i] = pack<Scalar>(x.h, y.h);
  }
  return to;
}

// Writes the sum of the four lanes of a row to dprobs, [rows, columns / 32, rounded up].
__device__ inline void write_prob_gradient(float* dprobs, const Chunk& chunk, int64_t columns,
                                           float dp) {
  dp = sum_over_quad(dp);
  if (quad_lane() != 0 || !chunk.is_there || chunk.column >= columns) return;
  const int64_t chunks = (columns + kChunk - 1) / kChunk;
  dprobs[chunk.row * chunks + chunk.column / kChunk] = dp;
}

}  // namespace moe_parallel::fused
