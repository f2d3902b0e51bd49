#pragma once

#include <cstdint>

#include "scalar_type.h"

#ifdef MOE_PARALLEL_CUDA
#include <cuda_runtime_api.h>
#endif

namespace moe_parallel {

// h[n] = silu(gate[n]) * up[n] * probs[n]
struct Swiglu {
  ScalarType type;    // of gate, up and h
  const void* gate;   // [rows, width], rows `gate_stride` elements apart
  const void* up;     // [rows, width], rows `up_stride` elements apart
  const void* probs;  // [rows] in the type of sums; null for 1
  void* h;            // [rows, width]
  int64_t rows;
  int64_t width;
  int64_t gate_stride;
  int64_t up_stride;
};

// The gradients of all inputs, and h, which is recomputed because the next weight gradient needs
// it.
struct SwigluBackward {
  ScalarType type;    // of all tensors but the probs
  const void* dh;     // [rows, width]
  const void* gate;   // as in Swiglu
  const void* up;     // as in Swiglu
  const void* probs;  // [rows] in the type of sums; null for 1
  void* dgate;        // [rows, width], rows `dgate_stride` elements apart
  void* dup;          // [rows, width], rows `dup_stride` elements apart
  void* dprobs;       // [rows] in the type of sums; null: not computed
  void* h;            // [rows, width]; null: not computed
  int64_t rows;
  int64_t width;
  int64_t gate_stride;
  int64_t up_stride;
  int64_t dgate_stride;
  int64_t dup_stride;
};

void run_on_cpu(const Swiglu& task);
void run_on_cpu(const SwigluBackward& task);
#ifdef MOE_PARALLEL_CUDA
void run_on_cuda(const Swiglu& task, cudaStream_t stream);
void run_on_cuda(const SwigluBackward& task, cudaStream_t stream);
#endif

}  // namespace moe_parallel
