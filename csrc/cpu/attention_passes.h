// What the forward and the backward pass of attention share.
//
// Attention runs in blocks of queries and keys (Dao 2023, arXiv 2307.08691). A thread computes all
// heads that share keys and values, one after the other, so the number of threads changes no bit.
// It needs memory for the packed keys and values of a head, in the backward pass for the sums of
// their gradients too, and for blocks whose size does not depend on the length.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

#include "../attention.h"
#include "../block_product.h"
#include "cache_lines.h"
#include "parts.h"

namespace moe_parallel {

// Queries and keys of a block. The scores of a block and its factors stay in the L2 cache.
constexpr int64_t kQueryBlock = 64, kKeyBlock = 256;

inline int64_t bytes_of_sum(ScalarType type) { return type == ScalarType::kFloat64 ? 8 : 4; }

inline int64_t padded(int64_t count) { return (count + kBlockUnit - 1) / kBlockUnit * kBlockUnit; }

// Some queries or keys. `size` is `count`, rounded up to a multiple of kBlockUnit.
struct TokenRange {
  int64_t first, count, size;
};

inline TokenRange range_of(int64_t first, int64_t most, int64_t length) {
  const int64_t count = std::min(most, length - first);
  return {first, count, padded(count)};
}

// Sizes that all passes over one head use.
struct AttentionSizes {
  AttentionShape shape;
  ScalarType type;
  int64_t bytes = bytes_of(type), sum_bytes = bytes_of_sum(type);
  int64_t width = shape.width, length = shape.length;

  // Whether factors are narrower than sums, so that they need memory of their own.
  bool has_narrow_factors() const { return bytes < sum_bytes; }
  void* rows(const HeadRows& x, int64_t batch, int64_t head, int64_t first) const {
    return static_cast<char*>(x.data) +
           (first * x.token_stride + batch * x.batch_stride + head * x.head_stride) * bytes;
  }
  PackedRows packed(const HeadRows& x, int64_t batch, int64_t head, const TokenRange& range) const {
    return {type, rows(x, batch, head, range.first), x.token_stride, range.count, range.size,
            width};
  }
  // The keys of the block at `first` that one of the queries sees.
  TokenRange keys_of(int64_t first, const TokenRange& queries) const {
    return range_of(first, std::min(kKeyBlock, queries.first + queries.count - first), length);
  }
};

// Runs a pass over every head of keys and values.
template <class Pass, class Task>
void over_groups(const Task& task) {
  const int64_t groups = task.shape.groups;
  if (task.shape.length == 0) return;
  at::parallel_for(0, task.shape.batch * groups, 1, [&](int64_t begin, int64_t end) {
    Pass pass(task);
    for (int64_t i = begin; i < end; ++i) pass.run(i / groups, i % groups);
    end_block_products();
  });
}

}  // namespace moe_parallel
