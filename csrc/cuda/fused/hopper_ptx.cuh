// The PTX instructions of sm_90a: barriers in shared memory at which copies arrive, and the
// products of a warpgroup.
#pragma once

#include <type_traits>

#include "ptx.cuh"

namespace moe_parallel::ptx {

// An mbarrier in shared memory. When as many threads or copies have arrived as it was initialized
// for, a phase ends and the next one begins.
struct alignas(8) Barrier {
  uint64_t opaque;
};

// The sums of a thread: 16 groups of 8 columns, in the layout of strip.cuh.
using Sums = float[16][4];

#ifdef __CUDACC__

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

// Waits until all copies of this thread are complete, including those that are in no group.
__device__ inline void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

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

// The accumulators as operand numbers in the text of an asm statement, and as its operands.
// clang-format off
#define MOE_PARALLEL_0_TO_63                                                   \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                     \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"           \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"           \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define MOE_PARALLEL_64_TO_127                                                 \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"           \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"           \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define MOE_PARALLEL_GROUP(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define MOE_PARALLEL_4_GROUPS(d, j)                              \
  MOE_PARALLEL_GROUP(d, j), MOE_PARALLEL_GROUP(d, j + 1),        \
  MOE_PARALLEL_GROUP(d, j + 2), MOE_PARALLEL_GROUP(d, j + 3)
#define MOE_PARALLEL_16_GROUPS(d)                                \
  MOE_PARALLEL_4_GROUPS(d, 0), MOE_PARALLEL_4_GROUPS(d, 4),      \
  MOE_PARALLEL_4_GROUPS(d, 8), MOE_PARALLEL_4_GROUPS(d, 12)
#define MOE_PARALLEL_WGMMA_128(type)                                           \
  asm volatile("{\n.reg .pred adds;\nsetp.eq.u32 adds, 0, 0;\n"                \
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type    \
               " {" MOE_PARALLEL_0_TO_63 "}, %64, %65, adds, 1, 1, 0, %66;\n}" \
               : MOE_PARALLEL_16_GROUPS(d)                                            \
               : "l"(a), "l"(b), "n"(int{!kByColumns}))
#define MOE_PARALLEL_WGMMA_256(type)                                           \
  asm volatile("{\n.reg .pred adds;\nsetp.eq.u32 adds, 0, 0;\n"                \
               "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type    \
               " {" MOE_PARALLEL_0_TO_63 "," MOE_PARALLEL_64_TO_127 "},"       \
               " %128, %129, adds, 1, 1, 0, %130;\n}"                          \
               : MOE_PARALLEL_16_GROUPS(d[0]), MOE_PARALLEL_16_GROUPS(d[1])                  \
               : "l"(a), "l"(b), "n"(int{!kByColumns}))
// clang-format on

// Keeps the compiler from moving an access to the accumulators before the wait for their products.
__device__ inline void keep_behind_wait(Sums& d) {
  asm volatile("" : MOE_PARALLEL_16_GROUPS(d)::"memory");
}
__device__ inline void keep_behind_wait(Sums (&d)[2]) {
  keep_behind_wait(d[0]);
  keep_behind_wait(d[1]);
}

// d += a b for 64 rows, 128 columns and a depth of 16. a is row-major. b is column-major if
// kByColumns, and row-major otherwise. The four warps of a warpgroup must call it together.
template <class Scalar, bool kByColumns>
__device__ inline void wgmma(Sums& d, uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<Scalar, __nv_bfloat16>) {
    MOE_PARALLEL_WGMMA_128("bf16");
  } else {
    MOE_PARALLEL_WGMMA_128("f16");
  }
}

// The same for 256 columns.
template <class Scalar, bool kByColumns>
__device__ inline void wgmma(Sums (&d)[2], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<Scalar, __nv_bfloat16>) {
    MOE_PARALLEL_WGMMA_256("bf16");
  } else {
    MOE_PARALLEL_WGMMA_256("f16");
  }
}

#undef MOE_PARALLEL_0_TO_63
#undef MOE_PARALLEL_64_TO_127
#undef MOE_PARALLEL_GROUP
#undef MOE_PARALLEL_4_GROUPS
#undef MOE_PARALLEL_16_GROUPS
#undef MOE_PARALLEL_WGMMA_128
#undef MOE_PARALLEL_WGMMA_256

#else

void make_barrier(Barrier& barrier, int arrivals);
void arrive(Barrier& barrier);
void wait(Barrier& barrier, uint32_t parity);
void arrive_after_copies(Barrier& barrier);
void wait_for_all_copies();
void order_copies_before_wgmma();
void begin_wgmma();
void commit_wgmma();
void wait_for_wgmma(int left);
inline void keep_behind_wait(Sums&) {}
inline void keep_behind_wait(Sums (&)[2]) {}
template <int kLeft>
void wait_for_wgmma() {
  wait_for_wgmma(kLeft);
}
template <int kRegisters>
void give_registers_back() {}
template <int kRegisters>
void take_registers() {}
void wgmma(float (*d)[4], int columns, uint64_t a, uint64_t b, bool by_columns, __nv_bfloat16);
void wgmma(float (*d)[4], int columns, uint64_t a, uint64_t b, bool by_columns, __half);
template <class Scalar, bool kByColumns>
void wgmma(Sums& d, uint64_t a, uint64_t b) {
  wgmma(d, 128, a, b, kByColumns, Scalar{});
}
template <class Scalar, bool kByColumns>
void wgmma(Sums (&d)[2], uint64_t a, uint64_t b) {
  wgmma(d[0], 256, a, b, kByColumns, Scalar{});
}

#endif

}  // namespace moe_parallel::ptx
