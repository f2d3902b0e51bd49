#pragma once

#include <cstdint>

#include "scalar_type.h"

#ifdef MOE_PARALLEL_CUDA
#include <cuda_runtime_api.h>
#endif

namespace moe_parallel {

// most[n] = max(logits[n]) and sums[n] = sum(exp(logits[n] - most[n])).
struct SoftmaxSums {
  ScalarType type;     // of logits
  const void* logits;  // [rows, width]
  void* most;          // [rows] in the type of sums
  void* sums;          // [rows] in the type of sums
  int64_t rows;
  int64_t width;
};

// logits[n] = exp(logits[n] - most[n]) / sums[n], less 1 at the label, if it is one of the columns.
struct SoftmaxGradient {
  ScalarType type;        // of logits
  void* logits;           // [rows, width]
  const int64_t* labels;  // [rows]
  const void* most;       // [rows] in the type of sums
  const void* sums;       // [rows] in the type of sums
  int64_t rows;
  int64_t width;
};

void run_on_cpu(const SoftmaxSums& task);
void run_on_cpu(const SoftmaxGradient& task);
#ifdef MOE_PARALLEL_CUDA
void run_on_cuda(const SoftmaxSums& task, cudaStream_t stream);
void run_on_cuda(const SoftmaxGradient& task, cudaStream_t stream);
#endif

}  // namespace moe_parallel
