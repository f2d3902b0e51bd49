// Which vector instructions the kernels use: the best that this processor has, or those that the
// environment variable MOE_PARALLEL_CPU names, chosen once.
#pragma once

#include <cstdint>

#include "../expert_merge.h"
#include "../norm_topk.h"
#include "../permute.h"
#include "../swiglu.h"
#include "../unpermute.h"

namespace moe_parallel {

// Parts begin..end of a task: of its tokens, rows, groups or columns, as each kernel says.
template <class Task>
using Kernel = void (*)(const Task& task, int64_t begin, int64_t end);

// expert_merge packs so many columns of all matrices at a time that they stay in the caches; the
// packed rows lie not a power of two apart, which caches would take badly.
constexpr int64_t kMergeColumns = 512;
constexpr int64_t kMergeStride = kMergeColumns + 16;

// The kernels of one capability; kernels/ has their one source.
struct Kernels {
  void (*permute)(const Permute& task, const int64_t* row_of_slot, int64_t begin, int64_t end);
  Kernel<Unpermute> unpermute;
  Kernel<UnpermuteBackward> unpermute_backward;
  Kernel<Swiglu> swiglu;
  Kernel<SwigluBackward> swiglu_backward;
  Kernel<GroupNorms> group_norms;
  Kernel<SelectTopK> select_topk;
  Kernel<NormGradient> norm_gradient;
  // Scratch is 64-byte aligned: kMergeStride sums for each expert; backward also for each merge,
  // and 64 bytes for each of the [merges, num_experts] products.
  void (*expert_merge)(const ExpertMerge& task, int64_t begin, int64_t end, void* scratch);
  void (*expert_merge_backward)(const ExpertMergeBackward& task, int64_t begin, int64_t end,
                                void* scratch, void* products);
};

struct Capability {
  const char* name;
  const Kernels& kernels;
};

// Throws std::invalid_argument where MOE_PARALLEL_CPU names none that this processor has.
const Capability& cpu_capability();

inline const Kernels& kernels() { return cpu_capability().kernels; }

}  // namespace moe_parallel
