// The vector instructions that the kernels use: the best that this processor has, or those that the
// environment variable MOE_PARALLEL_CPU names. They are selected once.
#pragma once

#include <cstdint>

#include "../block_product.h"
#include "../expert_merge.h"
#include "../norm_topk.h"
#include "../permute.h"
#include "../rms_norm.h"
#include "../rotary.h"
#include "../softmax.h"
#include "../swiglu.h"
#include "../unpermute.h"
#include "attention_blocks.h"

namespace moe_parallel {

// Runs the parts begin..end of a task. Depending on the kernel, a part is a token, a row, a group
// or a column.
template <class Task>
using Kernel = void (*)(const Task& task, int64_t begin, int64_t end);

// expert_merge packs this many columns of all matrices at a time, so that they stay in the caches.
// The stride of the packed rows is not a power of two, because such rows would share cache sets.
constexpr int64_t kMergeColumns = 512;
constexpr int64_t kMergeStride = kMergeColumns + 16;

// The kernels of one capability. All capabilities compile the same source, in kernels/.
struct Kernels {
  void (*permute)(const Permute& task, const int64_t* row_of_slot, int64_t begin, int64_t end);
  Kernel<Unpermute> unpermute;
  Kernel<UnpermuteBackward> unpermute_backward;
  Kernel<Swiglu> swiglu;
  Kernel<SwigluBackward> swiglu_backward;
  Kernel<RmsNorm> rms_norm;
  Kernel<RmsNormBackward> rms_norm_backward;
  Kernel<Rotary> rotary;
  void (*transpose_words)(const TransposeWords& task);
  void (*pair_rows)(const PairRows& task);
  Kernel<SoftmaxSums> softmax_sums;
  Kernel<SoftmaxGradient> softmax_gradient;
  Kernel<AttentionWeights> attention_weights;
  Kernel<AttentionOutput> attention_output;
  Kernel<AttentionRows> attention_rows;
  Kernel<AttentionDots> attention_dots;
  Kernel<AttentionScoreGradient> attention_score_gradient;
  Kernel<GroupNorms> group_norms;
  Kernel<SelectTopK> select_topk;
  Kernel<NormGradient> norm_gradient;
  // The scratch memory is 64-byte aligned and holds kMergeStride sums per expert. In the backward
  // pass it also holds kMergeStride sums per merge, and 64 bytes for each product of an expert and
  // a merge.
  void (*expert_merge)(const ExpertMerge& task, int64_t begin, int64_t end, void* scratch);
  void (*expert_merge_backward)(const ExpertMergeBackward& task, int64_t begin, int64_t end,
                                void* scratch, void* products);
};

struct Capability {
  const char* name;
  const Kernels& kernels;
};

// Throws std::invalid_argument if MOE_PARALLEL_CPU names no capability of this processor.
const Capability& cpu_capability();

inline const Kernels& kernels() { return cpu_capability().kernels; }

}  // namespace moe_parallel
