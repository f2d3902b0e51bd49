#pragma once

#include <cstdint>

#ifdef MOE_PARALLEL_CUDA
#include <cuda_runtime_api.h>
#endif

namespace moe_parallel {

// y[n] = x[slots[n] / choices], or zeros if slots[n] < 0. Rows are copied as bytes.
struct Permute {
  const void* x;         // [tokens, row_bytes], rows x_stride bytes apart
  const int64_t* slots;  // [rows]
  void* y;               // [rows, row_bytes], rows y_stride bytes apart
  int64_t tokens;
  int64_t choices;
  int64_t rows;
  int64_t row_bytes;
  int64_t x_stride;
  int64_t y_stride;
  // The inverse map, [tokens, choices]: the row of each choice. Null: not available. With it, CUDA
  // reads each token once, however many rows the token has.
  const int64_t* row_of_choice = nullptr;
  bool past_caches = false;  // y is stored past the CPU's caches; rows are whole cache lines
};

void run_on_cpu(const Permute& task);
#ifdef MOE_PARALLEL_CUDA
void run_on_cuda(const Permute& task, cudaStream_t stream);
#endif

}  // namespace moe_parallel
