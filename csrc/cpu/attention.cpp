// Attention on the CPU, forward and backward.
//
// Attention runs in blocks of queries and keys (Dao 2023, arXiv 2307.08691). A thread computes all
// heads that share keys and values, one after the other, so the number of threads changes no bit.
// It needs memory for the packed keys and values of a head, in the backward pass for the sums of
// their gradients too, and for blocks whose size does not depend on the length.
#include "../attention.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../block_product.h"
#include "cache_lines.h"
#include "capability.h"
#include "parts.h"

namespace moe_parallel {
namespace {

// Queries and keys of a block. The scores of a block and its factors stay in the L2 cache.
constexpr int64_t kQueryBlock = 64, kKeyBlock = 256;

int64_t bytes_of_sum(ScalarType type) { return type == ScalarType::kFloat64 ? 8 : 4; }

int64_t padded(int64_t count) { return (count + kBlockUnit - 1) / kBlockUnit * kBlockUnit; }

// Some queries or keys. `size` is `count`, rounded up to a multiple of kBlockUnit.
struct TokenRange {
  int64_t first, count, size;
};

TokenRange range_of(int64_t first, int64_t most, int64_t length) {
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

// The forward pass of a thread.
class ForwardPass {
 public:
  explicit ForwardPass(const Attention& task)
      : task_(task),
        at_{task.shape, task.type},
        keys_(whole_blocks() * kKeyBlock * at_.width * at_.bytes),
        values_(padded(at_.length) * at_.width * at_.bytes),
        queries_(kQueryBlock * at_.width * at_.bytes),
        scores_(kQueryBlock * kKeyBlock * at_.sum_bytes),
        weights_(at_.has_narrow_factors() ? kQueryBlock * kKeyBlock * at_.bytes : 0),
        sum_(kQueryBlock * at_.width * at_.sum_bytes),
        largest_(kQueryBlock * at_.sum_bytes),
        total_(kQueryBlock * at_.sum_bytes) {}

  void run(int64_t batch, int64_t group) {
    for (int64_t first = 0; first < at_.length; first += kKeyBlock) {
      const auto keys = range_of(first, kKeyBlock, at_.length);
      pack_right_transposed(at_.packed(task_.k, batch, group, keys), keys_at(first), kKeyBlock);
      pack_right(at_.packed(task_.v, batch, group, keys), values_at(first));
    }
    const int64_t share = task_.shape.heads / task_.shape.groups;
    for (int64_t head = group * share; head < (group + 1) * share; ++head) {
      for (int64_t first = 0; first < at_.length; first += kQueryBlock) {
        attend(batch, head, range_of(first, kQueryBlock, at_.length));
      }
    }
  }

 private:
  int64_t whole_blocks() const { return (at_.length + kKeyBlock - 1) / kKeyBlock; }
  char* keys_at(int64_t first) const { return keys_.at(first * at_.width * at_.bytes); }
  void* weights() const { return at_.has_narrow_factors() ? weights_ : scores_; }
  char* values_at(int64_t first) const { return values_.at(first * at_.width * at_.bytes); }

  void attend(int64_t batch, int64_t head, const TokenRange& queries) {
    pack_left(at_.packed(task_.q, batch, head, queries), queries_);
    for (int64_t first = 0; first < queries.first + queries.count; first += kKeyBlock) {
      add_keys(queries, at_.keys_of(first, queries));
    }
    kernels().attention_output(
        AttentionOutput{
            .type = at_.type,
            .largest = largest_,
            .total = total_,
            .sum = sum_,
            .out = at_.rows(task_.out, batch, head, queries.first),
            .logsumexp =
                static_cast<char*>(task_.logsumexp) +
                ((batch * task_.shape.heads + head) * at_.length + queries.first) * at_.sum_bytes,
            .width = at_.width,
            .out_stride = task_.out.token_stride},
        0, queries.count);
  }

  void add_keys(const TokenRange& queries, const TokenRange& keys) {
    multiply_blocks({.type = at_.type,
                     .m = queries.size,
                     .n = keys.size,
                     .k = at_.width,
                     .a = queries_,
                     .a_stride = at_.width,
                     .b = keys_at(keys.first),
                     .b_stride = kKeyBlock,
                     .c = scores_,
                     .c_stride = kKeyBlock,
                     .accumulate = false});
    kernels().attention_weights(AttentionWeights{.type = at_.type,
                                                 .scores = scores_,
                                                 .weights = weights(),
                                                 .largest = largest_,
                                                 .total = total_,
                                                 .out = sum_,
                                                 .stride = kKeyBlock,
                                                 .keys = keys.size,
                                                 .width = at_.width,
                                                 .seen = queries.first - keys.first + 1,
                                                 .scale = task_.shape.scale,
                                                 .is_first = keys.first == 0},
                                0, queries.size);
    multiply_blocks({.type = at_.type,
                     .m = queries.size,
                     .n = at_.width,
                     .k = keys.size,
                     .a = weights(),
                     .a_stride = kKeyBlock,
                     .b = values_at(keys.first),
                     .b_stride = at_.width,
                     .c = sum_,
                     .c_stride = at_.width,
                     .accumulate = keys.first > 0});
  }

  const Attention& task_;
  const AttentionSizes at_;
  const CacheLines keys_;     // K^T as right factor, in blocks of kKeyBlock
  const CacheLines values_;   // V as right factor
  const CacheLines queries_;  // Q as left factor
  const CacheLines scores_, weights_;
  const CacheLines sum_, largest_, total_;
};

// The backward pass of a thread. Scores are computed transposed, [keys, queries]. Then weights and
// gradients of scores are left factors of the gradients of V and K, and a right factor of that of
// Q^T, so that no block of them is transposed.
class BackwardPass {
 public:
  explicit BackwardPass(const AttentionBackward& task)
      : task_(task),
        at_{task.shape, task.type},
        keys_(whole_head(at_.bytes)),
        values_(whole_head(at_.bytes)),
        keys_transposed_(whole_head(at_.bytes)),
        dkeys_(whole_head(at_.sum_bytes)),
        dvalues_(whole_head(at_.sum_bytes)),
        queries_(kQueryBlock * at_.width * at_.bytes),
        queries_transposed_(kQueryBlock * at_.width * at_.bytes),
        dout_(kQueryBlock * at_.width * at_.bytes),
        dout_transposed_(kQueryBlock * at_.width * at_.bytes),
        dqueries_transposed_(kQueryBlock * at_.width * at_.sum_bytes),
        dqueries_(kQueryBlock * at_.width * at_.sum_bytes),
        logsumexp_(kQueryBlock * at_.sum_bytes),
        dots_(kQueryBlock * at_.sum_bytes),
        scores_(block(at_.sum_bytes)),
        dweights_(block(at_.sum_bytes)),
        weights_(at_.has_narrow_factors() ? block(at_.bytes) : 0),
        dscores_(at_.has_narrow_factors() ? block(at_.bytes) : 0),
        dscore_pairs_(at_.has_narrow_factors() ? block(at_.bytes) : 0) {}

  void run(int64_t batch, int64_t group) {
    for (int64_t first = 0; first < at_.length; first += kKeyBlock) {
      const auto keys = range_of(first, kKeyBlock, at_.length);
      pack_left(at_.packed(task_.k, batch, group, keys), of(keys_, first));
      pack_left(at_.packed(task_.v, batch, group, keys), of(values_, first));
      pack_left_transposed(at_.packed(task_.k, batch, group, keys), of(keys_transposed_, first),
                           kKeyBlock);
    }
    std::memset(dkeys_, 0, padded(at_.length) * at_.width * at_.sum_bytes);
    std::memset(dvalues_, 0, padded(at_.length) * at_.width * at_.sum_bytes);
    const int64_t share = task_.shape.heads / task_.shape.groups;
    for (int64_t head = group * share; head < (group + 1) * share; ++head) {
      for (int64_t first = 0; first < at_.length; first += kQueryBlock) {
        add_queries(batch, head, range_of(first, kQueryBlock, at_.length));
      }
    }
    write(dkeys_, task_.dk, batch, group, {0, at_.length, 0}, task_.shape.scale);
    write(dvalues_, task_.dv, batch, group, {0, at_.length, 0}, 1);
  }

 private:
  int64_t whole_head(int64_t bytes) const {
    return (at_.length + kKeyBlock - 1) / kKeyBlock * kKeyBlock * at_.width * bytes;
  }
  static int64_t block(int64_t bytes) { return kQueryBlock * kKeyBlock * bytes; }
  void* of(const CacheLines& head, int64_t first) const {
    return head.at(first * at_.width * at_.bytes);
  }
  void* sums_of(const CacheLines& head, int64_t first) const {
    return head.at(first * at_.width * at_.sum_bytes);
  }
  void* weights() const { return at_.has_narrow_factors() ? weights_ : scores_; }
  void* dscores() const { return at_.has_narrow_factors() ? dscores_ : dweights_; }
  void* dscores_as_right_factor() const {
    return at_.has_narrow_factors() ? dscore_pairs_ : dweights_;
  }

  void write(const CacheLines& sums, const HeadRows& to, int64_t batch, int64_t head,
             const TokenRange& tokens, double scale) const {
    kernels().attention_rows(AttentionRows{.type = at_.type,
                                           .from = sums,
                                           .to = at_.rows(to, batch, head, tokens.first),
                                           .width = at_.width,
                                           .to_stride = to.token_stride,
                                           .scale = scale},
                             0, tokens.count);
  }

  void add_queries(int64_t batch, int64_t head, const TokenRange& queries) {
    pack_queries(batch, head, queries);
    for (int64_t first = 0; first < queries.first + queries.count; first += kKeyBlock) {
      const auto keys = at_.keys_of(first, queries);
      compute_scores(queries, keys);
      add_gradients(queries, keys);
    }
    pack_left_transposed({.type = sum_type(),
                          .rows = dqueries_transposed_,
                          .stride = kQueryBlock,
                          .count = at_.width,
                          .padded = at_.width,
                          .width = queries.size},
                         dqueries_, at_.width);
    write(dqueries_, task_.dq, batch, head, queries, task_.shape.scale);
  }

  ScalarType sum_type() const {
    return at_.type == ScalarType::kFloat64 ? ScalarType::kFloat64 : ScalarType::kFloat32;
  }

  void pack_queries(int64_t batch, int64_t head, const TokenRange& queries) {
    const auto q = at_.packed(task_.q, batch, head, queries);
    const auto dout = at_.packed(task_.dout, batch, head, queries);
    pack_right(q, queries_);
    pack_right(dout, dout_);
    pack_right_transposed(q, queries_transposed_, kQueryBlock);
    pack_right_transposed(dout, dout_transposed_, kQueryBlock);
    const int64_t first = (batch * task_.shape.heads + head) * at_.length + queries.first;
    std::memset(logsumexp_, 0, kQueryBlock * at_.sum_bytes);
    std::memcpy(logsumexp_, static_cast<const char*>(task_.logsumexp) + first * at_.sum_bytes,
                queries.count * at_.sum_bytes);
    std::memset(dots_, 0, kQueryBlock * at_.sum_bytes);
    kernels().attention_dots(AttentionDots{.type = at_.type,
                                           .dout = at_.rows(task_.dout, batch, head, queries.first),
                                           .out = at_.rows(task_.out, batch, head, queries.first),
                                           .dots = dots_,
                                           .width = at_.width,
                                           .dout_stride = task_.dout.token_stride,
                                           .out_stride = task_.out.token_stride},
                             0, queries.count);
  }

  void compute_scores(const TokenRange& queries, const TokenRange& keys) {
    const auto multiply = [&](void* rows, void* columns, void* to) {
      multiply_blocks({.type = at_.type,
                       .m = keys.size,
                       .n = queries.size,
                       .k = at_.width,
                       .a = rows,
                       .a_stride = at_.width,
                       .b = columns,
                       .b_stride = kQueryBlock,
                       .c = to,
                       .c_stride = kQueryBlock,
                       .accumulate = false});
    };
    multiply(of(keys_, keys.first), queries_transposed_, scores_);
    multiply(of(values_, keys.first), dout_transposed_, dweights_);
    kernels().attention_score_gradient(
        AttentionScoreGradient{.type = at_.type,
                               .scores = scores_,
                               .dweights = dweights_,
                               .logsumexp = logsumexp_,
                               .dots = dots_,
                               .weights = weights(),
                               .dscores = dscores(),
                               .dscore_pairs = dscore_pairs_,
                               .stride = kQueryBlock,
                               .queries = queries.size,
                               .unseeing = keys.first - queries.first,
                               .scale = task_.shape.scale},
        0, keys.size / 2);
  }

  void add_gradients(const TokenRange& queries, const TokenRange& keys) {
    const auto add = [&](void* rows, void* columns, void* to) {
      multiply_blocks({.type = at_.type,
                       .m = keys.size,
                       .n = at_.width,
                       .k = queries.size,
                       .a = rows,
                       .a_stride = kQueryBlock,
                       .b = columns,
                       .b_stride = at_.width,
                       .c = to,
                       .c_stride = at_.width,
                       .accumulate = true});
    };
    add(weights(), dout_, sums_of(dvalues_, keys.first));
    add(dscores(), queries_, sums_of(dkeys_, keys.first));
    multiply_blocks({.type = at_.type,
                     .m = at_.width,
                     .n = queries.size,
                     .k = keys.size,
                     .a = of(keys_transposed_, keys.first),
                     .a_stride = kKeyBlock,
                     .b = dscores_as_right_factor(),
                     .b_stride = kQueryBlock,
                     .c = dqueries_transposed_,
                     .c_stride = kQueryBlock,
                     .accumulate = keys.first > 0});
  }

  const AttentionBackward& task_;
  const AttentionSizes at_;
  const CacheLines keys_, values_;    // of a head, as left factors
  const CacheLines keys_transposed_;  // as left factor, in blocks of kKeyBlock
  const CacheLines dkeys_, dvalues_;  // sums over the queries of all heads that share them
  const CacheLines queries_, queries_transposed_, dout_, dout_transposed_;  // as right factors
  const CacheLines dqueries_transposed_, dqueries_;
  const CacheLines logsumexp_, dots_;
  const CacheLines scores_, dweights_;                 // sums, [keys, queries]
  const CacheLines weights_, dscores_, dscore_pairs_;  // factors, if they are narrower
};

}  // namespace

void run_on_cpu(const Attention& task) { over_groups<ForwardPass>(task); }
void run_on_cpu(const AttentionBackward& task) { over_groups<BackwardPass>(task); }

}  // namespace moe_parallel
