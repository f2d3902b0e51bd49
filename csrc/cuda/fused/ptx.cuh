// The PTX instructions of the fused products. Without nvcc these functions are only declared, and
// tests/cuda_host implements them as the PTX ISA describes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace moe_parallel::ptx {

// An offset in bytes from the start of the block's shared memory.
using SharedAddress = uint32_t;

#ifdef __CUDACC__

// The dynamic shared memory of the kernel.
__device__ inline char* shared_memory() {
  extern __shared__ __align__(1024) char memory[];
  return memory;
}

__device__ inline SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or writes zeros if !is_there. The copy is complete when its group has been
// waited for. The address must be one of global memory even if nothing is read: see
// copy_or_clear().
__device__ inline void copy_async(SharedAddress to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(is_there ? 16 : 0)
               : "memory");
}

// The copies of this thread since the last group become a new group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all groups of this thread but the latest kGroups are complete.
template <int kGroups>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Loads four matrices of 8 rows of 16 bytes. Lane l gives the address of row l % 8 of matrix l / 8.
// From each matrix, lane 4 r + q receives the 16-bit elements 2 q and 2 q + 1 of row r, or of
// column r if transposed.
__device__ inline void load_matrices(SharedAddress row, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}
__device__ inline void load_transposed(SharedAddress row, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}

// d += a b, where a is [16, 16] and b is [16, 8]. Of d, lane 4 r + q holds rows r, r, r + 8, r + 8
// and columns 2 q, 2 q + 1, 2 q, 2 q + 1. Of a, it holds pairs of columns that begin at (r, 2 q),
// (r + 8, 2 q), (r, 2 q + 8) and (r + 8, 2 q + 8). Of b, it holds pairs of rows that begin at
// (2 q, r) and (2 q + 8, r).
__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Stores 16 bytes at once. The address must be a multiple of 16 and in global memory. The compiler
// splits the store of a uint4 from selected registers into four stores if it sees no vector in
// them.
__device__ inline void store_vector(void* to, const uint32_t (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// Rounds x into the lower and y into the upper half of a register with one instruction. If they are
// rounded one by one, ptxas keeps them in two registers.
__device__ inline uint32_t round_pair(float x, float y, __nv_bfloat16) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}
__device__ inline uint32_t round_pair(float x, float y, __half) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}

#else

char* shared_memory();
SharedAddress shared_address(const void* pointer);
void copy_async(SharedAddress to, const void* from, bool is_there);
void commit_copies();
void wait_for_copies(int groups);
template <int kGroups>
void wait_for_copies() {
  wait_for_copies(kGroups);
}
void load_matrices(SharedAddress row, uint32_t (&x)[4]);
void load_transposed(SharedAddress row, uint32_t (&x)[4]);
void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __nv_bfloat16);
void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half);
void store_vector(void* to, const uint32_t (&x)[4]);
uint32_t round_pair(float x, float y, __nv_bfloat16);
uint32_t round_pair(float x, float y, __half);

#endif

// The same as copy_async(), but if !is_there, `from` need not be a valid address. `somewhere` must
// be one.
__device__ inline void copy_or_clear(SharedAddress to, const void* from, bool is_there,
                                     const void* somewhere) {
  copy_async(to, is_there ? from : somewhere, is_there);
}

}  // namespace moe_parallel::ptx
