// The PTX instructions of the kernel in norm_topk_hopper.cu. Without nvcc these functions are only
// declared, and tests/cuda_host implements them as the PTX ISA describes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace moe_parallel::ptx {

// An offset in bytes from the start of the block's shared memory.
using SharedAddress = uint32_t;

// An mbarrier in shared memory. When as many threads or copies have arrived as it was initialized
// for, a phase ends and the next one begins.
struct alignas(8) Barrier {
  uint64_t opaque;
};

// A thread's sums of 64 rows and 256 columns: 32 groups of 8 columns. In group j, lane 4 r + q of
// warp w holds rows 16 w + r (twice) and 16 w + r + 8 (twice), and columns 8 j + 2 q and
// 8 j + 2 q + 1 of both.
using Sums = float[32][4];

#ifdef __CUDACC__

// The dynamic shared memory of the kernel.
__device__ inline char* shared_memory() {
  extern __shared__ __align__(1024) char memory[];
  return memory;
}

__device__ inline SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or writes zeros if !is_there. The address must be one of global memory even if
// nothing is read: see copy_or_clear().
__device__ inline void copy_async(SharedAddress to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(is_there ? 16 : 0)
               : "memory");
}

// Waits until all copies of this thread are complete.
__device__ inline void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

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

__device__ inline void make_barrier(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}

__device__ inline void arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

// Returns when the phase of this parity has ended. It is the previous phase or the current one.
__device__ inline void wait(Barrier& barrier, uint32_t parity) {
  uint32_t has_ended = 0;
  while (!has_ended) {
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
        "selp.b32 %0, 1, 0, ended;\n"
        "}\n"
        : "=r"(has_ended)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
  }
}

// The thread arrives when the copies that it has started are complete. It does not wait. The
// arrival is one of those that the barrier was initialized for (noinc).
__device__ inline void arrive_after_copies(Barrier& barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier))
      : "memory");
}

// Orders what threads or their copies wrote before what wgmma reads.
__device__ inline void order_copies_before_wgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Comes first in each group of products. It orders earlier accesses to the accumulators before the
// products.
__device__ inline void begin_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void commit_wgmma() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the last kLeft groups are in flight.
template <int kLeft>
__device__ inline void wait_for_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

template <int kRegisters>
__device__ inline void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The sums as the operands of an asm statement, and a product into them.
// clang-format off
#define MOE_PARALLEL_GROUP(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define MOE_PARALLEL_8_GROUPS(d, j)                                            \
  MOE_PARALLEL_GROUP(d, j), MOE_PARALLEL_GROUP(d, j + 1),                      \
  MOE_PARALLEL_GROUP(d, j + 2), MOE_PARALLEL_GROUP(d, j + 3),                  \
  MOE_PARALLEL_GROUP(d, j + 4), MOE_PARALLEL_GROUP(d, j + 5),                  \
  MOE_PARALLEL_GROUP(d, j + 6), MOE_PARALLEL_GROUP(d, j + 7)
#define MOE_PARALLEL_SUMS(d)                                                   \
  MOE_PARALLEL_8_GROUPS(d, 0), MOE_PARALLEL_8_GROUPS(d, 8),                    \
  MOE_PARALLEL_8_GROUPS(d, 16), MOE_PARALLEL_8_GROUPS(d, 24)
#define MOE_PARALLEL_WGMMA(type)                                               \
  asm volatile("{\n.reg .pred adds;\nsetp.eq.u32 adds, 0, 0;\n"                \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {"        \
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                 \
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"       \
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"       \
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"       \
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"       \
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"       \
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,"     \
      "%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,"      \
      "%123,%124,%125,%126,%127}, %128, %129, adds, 1, 1, 0, 1;\n}"            \
      : MOE_PARALLEL_SUMS(d) : "l"(a), "l"(b))
// clang-format on

// Keeps the compiler from moving an access to the sums before the wait for their products.
__device__ inline void keep_behind_wait(Sums& d) {
  asm volatile("" : MOE_PARALLEL_SUMS(d)::"memory");
}

// d += a b for 64 rows, 256 columns and a depth of 16. Both matrices are row-major. The four warps
// of a warpgroup must call it together.
__device__ inline void wgmma(Sums& d, uint64_t a, uint64_t b, __nv_bfloat16) {
  MOE_PARALLEL_WGMMA("bf16");
}
__device__ inline void wgmma(Sums& d, uint64_t a, uint64_t b, __half) { MOE_PARALLEL_WGMMA("f16"); }

#undef MOE_PARALLEL_GROUP
#undef MOE_PARALLEL_8_GROUPS
#undef MOE_PARALLEL_SUMS
#undef MOE_PARALLEL_WGMMA

#else

char* shared_memory();
SharedAddress shared_address(const void* pointer);
void copy_async(SharedAddress to, const void* from, bool is_there);
void wait_for_all_copies();
void store_vector(void* to, const uint32_t (&x)[4]);
uint32_t round_pair(float x, float y, __nv_bfloat16);
uint32_t round_pair(float x, float y, __half);
void make_barrier(Barrier& barrier, int arrivals);
void arrive(Barrier& barrier);
void wait(Barrier& barrier, uint32_t parity);
void arrive_after_copies(Barrier& barrier);
void order_copies_before_wgmma();
void begin_wgmma();
void commit_wgmma();
void wait_for_wgmma(int left);
template <int kLeft>
void wait_for_wgmma() {
  wait_for_wgmma(kLeft);
}
template <int kRegisters>
void give_registers_back() {}
template <int kRegisters>
void take_registers() {}
inline void keep_behind_wait(Sums&) {}
void wgmma(Sums& d, uint64_t a, uint64_t b, __nv_bfloat16);
void wgmma(Sums& d, uint64_t a, uint64_t b, __half);

#endif

// The same as copy_async(), but if !is_there, `from` need not be a valid address. `somewhere` must
// be one.
__device__ inline void copy_or_clear(SharedAddress to, const void* from, bool is_there,
                                     const void* somewhere) {
  copy_async(to, is_there ? from : somewhere, is_there);
}

}  // namespace moe_parallel::ptx
