#pragma once

#include <cstdint>

#include "scalar_type.h"

#ifdef MOE_PARALLEL_CUDA
#include <cuda_runtime_api.h>
#endif

namespace moe_parallel {

// out[t] = sum over k of probs[t, k] * y[rows[t, k]]. Choices with rows[t, k] < 0 are left out.
struct Unpermute {
  ScalarType type;      // of y and out
  const void* y;        // [num_rows, width], rows y_stride elements apart
  const int64_t* rows;  // [tokens, choices]
  const void* probs;    // [tokens, choices] in the type of sums; null for probs of 1
  void* out;            // [tokens, width], rows out_stride elements apart
  int64_t tokens;
  int64_t choices;
  int64_t num_rows;
  int64_t width;
  int64_t y_stride;
  int64_t out_stride;
  bool past_caches = false;  // out is stored past the CPU's caches; rows are whole cache lines
};

// dy[rows[t, k]] = probs[t, k] * dout[t], and zeros in padding rows (slots[n] < 0).
// dprobs[t, k] = y[rows[t, k]] . dout[t], or 0 if rows[t, k] < 0.
struct UnpermuteBackward {
  ScalarType type;       // of dout, y and dy
  const void* dout;      // [tokens, width]
  const void* y;         // [num_rows, width]
  const int64_t* slots;  // [num_rows]
  const int64_t* rows;   // [tokens, choices]
  const void* probs;     // [tokens, choices] in the type of sums
  void* dy;              // [num_rows, width]
  void* dprobs;          // [tokens, choices] in the type of sums
  int64_t tokens;
  int64_t choices;
  int64_t num_rows;
  int64_t width;
  bool past_caches = false;  // as above, for dy
};

void run_on_cpu(const Unpermute& task);
void run_on_cpu(const UnpermuteBackward& task);
#ifdef MOE_PARALLEL_CUDA
void run_on_cuda(const Unpermute& task, cudaStream_t stream);
void run_on_cuda(const UnpermuteBackward& task, cudaStream_t stream);
#endif

}  // namespace moe_parallel
