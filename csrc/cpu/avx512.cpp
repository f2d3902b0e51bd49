// The kernels for AVX-512 F, BW, DQ and VL: Intel since Skylake-SP.
#ifdef __x86_64__

// These headers come before the target pragma, because their functions must run on every processor.
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __clang__
#pragma clang attribute push(                                                    \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
    apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

#define MOE_PARALLEL_CAPABILITY avx512
#define MOE_PARALLEL_VECTOR_BYTES 64

#include "kernels/table.h"

#ifdef __clang__
#pragma clang attribute pop
#endif

#endif
