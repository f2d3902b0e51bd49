// The element-wise steps of attention on a block of queries and keys. Sums are double for double
// and float for the rest. Numbers of queries and of keys in a block are multiples of kBlockUnit
// (block_product.h), and rows are dense, unless a stride is named.
#pragma once

#include <cstdint>

#include "../scalar_type.h"

namespace moe_parallel {

// The forward pass: the scores of queries become weights exp(scale score - largest), and the sums
// over earlier blocks of keys are scaled to the new largest score. Rows are queries.
struct AttentionWeights {
  ScalarType type;     // of the weights
  const void* scores;  // sums [queries, keys], rows `stride` apart
  void* weights;       // [queries, keys], rows `stride` apart; in fp32 it may be `scores`
  void* largest;       // sums [queries]: the largest scaled score so far
  void* total;         // sums [queries]: of the weights so far
  void* out;           // sums [queries, width]: of weights and values so far
  int64_t stride;
  int64_t keys;
  int64_t width;
  int64_t seen;  // row i sees the first `seen + i` keys; may be negative
  double scale;
  bool is_first;  // block of keys: the sums begin here
};

// The end of the forward pass. Rows are queries.
struct AttentionOutput {
  ScalarType type;  // of out
  const void* largest;
  const void* total;
  const void* sum;  // sums [queries, width]
  void* out;        // [queries, width], rows `out_stride` apart
  void* logsumexp;  // sums [queries]
  int64_t width;
  int64_t out_stride;
};

// Gradients of rows from their sums: to = scale from.
struct AttentionRows {
  ScalarType type;   // of to
  const void* from;  // sums [rows, width]
  void* to;          // [rows, width], rows `to_stride` apart
  int64_t width;
  int64_t to_stride;
  double scale;
};

// dots = sum(dout out) of each query. Rows are queries.
struct AttentionDots {
  ScalarType type;
  const void* dout;
  const void* out;
  void* dots;  // sums [queries]
  int64_t width;
  int64_t dout_stride;
  int64_t out_stride;
};

// The backward pass: weights = exp(scale score - logsumexp) and the gradient of the scaled scores,
// weights (dweights - dots). Rows are pairs of keys, columns are queries.
struct AttentionScoreGradient {
  ScalarType type;        // of weights and dscores
  const void* scores;     // sums [keys, queries]
  const void* dweights;   // sums [keys, queries]
  const void* logsumexp;  // sums [queries]
  const void* dots;       // sums [queries]
  void* weights;          // [keys, queries]; in fp32 it may be `scores`
  void* dscores;          // [keys, queries]; in fp32 it may be `dweights`
  void* dscore_pairs;     // [keys / 2, queries] words of two keys, for bf16 only
  int64_t stride;         // of rows of all matrices
  int64_t queries;
  int64_t unseeing;  // row i is seen by no query before column `unseeing + i`; may be negative
  double scale;
};

}  // namespace moe_parallel
