#pragma once

#include <cstdint>

#include "scalar_type.h"

namespace moe_parallel {

// A tensor [length, batch, heads, width] whose numbers of one head of one token are dense.
// Distances are in elements.
struct HeadRows {
  void* data;  // only read if it is an input
  int64_t token_stride;
  int64_t batch_stride;
  int64_t head_stride;
};

struct AttentionShape {
  int64_t length;
  int64_t batch;
  int64_t heads;   // of queries; a multiple of `groups`
  int64_t groups;  // heads of keys and values
  int64_t width;   // of a head
  double scale;    // of the scores
};

// out = softmax(scale q k^T) v, where a query sees the keys of its own and of earlier tokens, and
// `heads / groups` heads share the keys and values of one.
struct Attention {
  ScalarType type;  // of q, k, v and out
  AttentionShape shape;
  HeadRows q, k, v, out;
  void* logsumexp;  // sums [batch, heads, length]: of the scaled scores of a query
};

struct AttentionBackward {
  ScalarType type;  // of all tensors but logsumexp
  AttentionShape shape;
  HeadRows dout, q, k, v, out;
  HeadRows dq, dk, dv;
  const void* logsumexp;  // as in Attention
};

// Whether attention in this type, fp32 or bf16, was measured to be faster than torch's on
// processors of this kind.
bool has_fast_attention(ScalarType type);

void run_on_cpu(const Attention& task);
void run_on_cpu(const AttentionBackward& task);

}  // namespace moe_parallel
