// The kernels for AVX2 with FMA and F16C: Intel since Haswell, AMD since Excavator and Zen.
#ifdef __x86_64__

// These headers come before the target pragma, because their functions must run on every processor.
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define MOE_PARALLEL_CAPABILITY avx2
#define MOE_PARALLEL_VECTOR_BYTES 32

#include "kernels/table.h"

#ifdef __clang__
#pragma clang attribute pop
#endif

#endif
