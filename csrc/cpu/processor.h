// What is asked of the processor besides its capabilities. Torch-free.
#pragma once

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace moe_parallel {

#ifdef __x86_64__

inline bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
  return has;
}

inline bool has_avx512() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has;
}

// With instructions for bf16, which oneDNN's kernel for blocks needs.
inline bool has_avx512_bf16() {
  static const bool has = has_avx512() && __builtin_cpu_supports("avx512bf16");
  return has;
}

// Products of bf16 in tiles of registers: Intel's Xeons since Sapphire Rapids.
inline bool has_amx() {
  static const bool has = [] {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & bit_AMX_BF16) != 0;
  }();
  return has;
}

inline bool is_intel() {
  static const bool is = __builtin_cpu_is("intel");
  return is;
}

inline bool is_amd() {
  static const bool is = __builtin_cpu_is("amd");
  return is;
}

#else

inline bool has_avx2() { return false; }
inline bool has_avx512() { return false; }
inline bool has_avx512_bf16() { return false; }
inline bool has_amx() { return false; }
inline bool is_intel() { return false; }
inline bool is_amd() { return false; }

#endif

}  // namespace moe_parallel
