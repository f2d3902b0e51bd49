#include "../attention.h"

#include "attention_passes.h"
#include "capability.h"

namespace moe_parallel {
namespace {

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

}  // namespace

void run_on_cpu(const Attention& task) { over_groups<ForwardPass>(task); }

}  // namespace moe_parallel
