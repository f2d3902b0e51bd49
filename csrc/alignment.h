// How memory is aligned, and whether it can be read and written 16 bytes at a time. Torch-free.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace moe_parallel {

constexpr int64_t kVectorBytes = 16;
constexpr int64_t kCacheLine = 64;  // bytes, on every processor that has kernels of its own

// Whether every address and every distance, which is given in elements, is a multiple of `bytes`. A
// null pointer stands for an absent tensor and counts as aligned.
inline bool are_aligned(std::initializer_list<const void*> addresses,
                        std::initializer_list<int64_t> distances, int64_t element_bytes,
                        int64_t bytes = kVectorBytes) {
  for (const void* address : addresses) {
    if (reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) != 0) return false;
  }
  for (int64_t distance : distances) {
    if (distance * element_bytes % bytes != 0) return false;
  }
  return true;
}

}  // namespace moe_parallel
