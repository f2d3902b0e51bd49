// The part of CUDA that csrc/cuda uses, for a C++ compiler. The threads of a block are fibers of
// one thread, and the blocks run one after another. A collective that not all of its threads reach
// ends the process.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

using cudaStream_t = struct Stream*;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned x) : x(x) {}
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// An H100, or an A100, with few multiprocessors, so that each block has many tiles.
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMultiProcessorCount,
};
namespace cuda_host {
inline int capability_major = 9;
inline bool grants_shared_memory = true;
}  // namespace cuda_host
inline void cudaGetDevice(int* device) { *device = 0; }
inline void cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const int values[] = {cuda_host::capability_major, 0, 3};
  *value = values[attribute];
}

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cuda_host::grants_shared_memory ? cudaSuccess : cudaErrorInvalidValue;
}

using std::max;
using std::min;

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace cuda_host {

constexpr int kWarp = 32;

// Runs body once for each thread of each block.
void run_blocks(dim3 blocks, dim3 threads, std::size_t shared_bytes,
                const std::function<void()>& body);

// The dynamic shared memory of the kernel that runs.
std::size_t shared_bytes();

// Returns when all threads of the block, or of the warp, have called it.
void wait_for_block();
void wait_for_warp();

// Returns the values of all lanes of this warp, once all lanes have called it.
const std::array<uint64_t, kWarp>& exchange(uint64_t mine);

// Waits until the condition holds. Other threads make it true.
void wait_until(const std::function<bool()>& condition);

// Called before each block: shared memory holds NaN, and nothing is under way (hopper_ptx.cpp).
void begin_block();

// End the process if a thread has ended before its copies, or a block before its products.
void expect_no_copies_under_way();
void expect_no_products_under_way();

// Ends one of the copies that a barrier waits for. Returns false if there are none.
bool deliver_a_copy();

int lane();

template <class T>
uint64_t bits_of(T x) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof(T));
  return bits;
}

template <class T>
T value_of(uint64_t bits) {
  T x;
  std::memcpy(&x, &bits, sizeof(T));
  return x;
}

}  // namespace cuda_host

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
};

template <class... Parameters, class... Arguments>
void cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                        Arguments... arguments) {
  cuda_host::run_blocks(config->gridDim, config->blockDim, config->dynamicSmemBytes,
                        [&] { kernel(arguments...); });
}

inline void __syncthreads() { cuda_host::wait_for_block(); }
inline void __syncwarp() { cuda_host::wait_for_warp(); }

template <class T>
T __shfl_down_sync(unsigned, T x, int offset, int width = cuda_host::kWarp) {
  const auto& given = cuda_host::exchange(cuda_host::bits_of(x));
  const int lane = cuda_host::lane();
  return lane % width + offset < width ? cuda_host::value_of<T>(given[lane + offset]) : x;
}

template <class T>
T __shfl_up_sync(unsigned, T x, int offset) {
  const auto& given = cuda_host::exchange(cuda_host::bits_of(x));
  const int lane = cuda_host::lane();
  return lane >= offset ? cuda_host::value_of<T>(given[lane - offset]) : x;
}

template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  return cuda_host::value_of<T>(cuda_host::exchange(cuda_host::bits_of(x))[lane]);
}

template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return cuda_host::value_of<T>(
      cuda_host::exchange(cuda_host::bits_of(x))[cuda_host::lane() ^ mask]);
}

template <class T>
unsigned __match_any_sync(unsigned, T x) {
  const auto& given = cuda_host::exchange(cuda_host::bits_of(x));
  unsigned same = 0;
  for (int i = 0; i < cuda_host::kWarp; ++i) {
    same |= unsigned{given[i] == cuda_host::bits_of(x)} << i;
  }
  return same;
}

inline unsigned __ballot_sync(unsigned, bool x) {
  const auto& given = cuda_host::exchange(x);
  unsigned votes = 0;
  for (int i = 0; i < cuda_host::kWarp; ++i) votes |= unsigned{given[i] != 0} << i;
  return votes;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
