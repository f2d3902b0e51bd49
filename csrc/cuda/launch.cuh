// The launch of kernels, and the assignment of items to threads. Torch-free.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace moe_parallel {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWarpsPerBlock = kThreads / kWarp;
constexpr int64_t kMaxBlocks = int64_t{1} << 20;  // for more items the kernels loop
constexpr unsigned kAllLanes = 0xffffffffu;

// The number of blocks for `items`. Each kernel has a grid-stride loop for the rest.
inline int blocks_for(int64_t items, int64_t items_per_block) {
  return static_cast<int>(std::min((items + items_per_block - 1) / items_per_block, kMaxBlocks));
}

// A call rather than <<<...>>>, so that a C++ compiler can compile these files too
// (tests/cuda_host).
template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), int blocks, cudaStream_t stream,
                   const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x % kWarp); }
__device__ inline int warp_in_block() { return static_cast<int>(threadIdx.x / kWarp); }

// for (item = first_warp(); item < items; item += num_warps()): one warp per item.
__device__ inline int64_t first_warp() {
  return int64_t{blockIdx.x} * kWarpsPerBlock + warp_in_block();
}
__device__ inline int64_t num_warps() { return int64_t{gridDim.x} * kWarpsPerBlock; }

// The same with one thread per item.
__device__ inline int64_t first_thread() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }
__device__ inline int64_t num_threads() { return int64_t{gridDim.x} * kThreads; }

}  // namespace moe_parallel
