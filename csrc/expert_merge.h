#pragma once

#include <cstdint>

#include "scalar_type.h"

#ifdef MOE_PARALLEL_CUDA
#include <cuda_runtime_api.h>
#endif

namespace moe_parallel {

// merged[p] = sum over e of weights[p, e] * w[e]. The sum is computed in the type of sums and
// rounded once.
struct ExpertMerge {
  ScalarType type;      // of w and merged
  const void* weights;  // [merges, num_experts] in the type of sums
  const void* w;        // [num_experts, size]
  void* merged;         // [merges, size]
  int64_t merges;
  int64_t num_experts;
  int64_t size;
};

// dw[e] = sum over p of weights[p, e] * dmerged[p]; dweights[p, e] = dmerged[p] . w[e].
struct ExpertMergeBackward {
  ScalarType type;      // of dmerged, w and dw
  const void* dmerged;  // [merges, size]
  const void* weights;  // [merges, num_experts] in the type of sums
  const void* w;        // [num_experts, size]
  void* dweights;       // [merges, num_experts] in the type of sums
  void* dw;             // [num_experts, size]
  int64_t merges;
  int64_t num_experts;
  int64_t size;
};

void run_on_cpu(const ExpertMerge& task);
void run_on_cpu(const ExpertMergeBackward& task);
#ifdef MOE_PARALLEL_CUDA
void run_on_cuda(const ExpertMerge& task, cudaStream_t stream);
void run_on_cuda(const ExpertMergeBackward& task, cudaStream_t stream);
#endif

}  // namespace moe_parallel
