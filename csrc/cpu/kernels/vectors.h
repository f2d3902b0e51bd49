// Vectors of sums: as many floats or doubles as a register of this capability holds.
//
// Arithmetic, comparisons and `mask ? a : b` are the compiler's own on vector types; here is what
// it has no operator for. Rows of bf16 and fp16 become floats where they are loaded, and are
// rounded (to nearest even, NaN stays NaN) where they are stored.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if MOE_PARALLEL_VECTOR_BYTES > 16
#include <immintrin.h>
#endif

#include "../../scalar_type.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

constexpr int64_t kVectorBytes = MOE_PARALLEL_VECTOR_BYTES;

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// body(Scalar{}) with the C++ type that the name stands for.
template <class Body>
inline void with_scalar(ScalarType type, const Body& body) {
  switch (type) {
    case ScalarType::kFloat32:
      return body(float{});
    case ScalarType::kFloat64:
      return body(double{});
    case ScalarType::kBFloat16:
      return body(BFloat16{});
    case ScalarType::kFloat16:
      return body(Float16{});
  }
}

template <class Element, int64_t kBytes>
struct VectorOf {
  typedef Element type __attribute__((vector_size(kBytes)));
};
template <class Sum>
using Vector = typename VectorOf<Sum, kVectorBytes>::type;
using Words = Vector<uint32_t>;
using HalfWords = typename VectorOf<uint16_t, kVectorBytes / 2>::type;

template <class Sum>
constexpr int64_t kLanes = kVectorBytes / static_cast<int64_t>(sizeof(Sum));

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class To>
inline To read(const void* p) {
  To to;
  std::memcpy(&to, p, sizeof to);
  return to;
}

template <class From>
inline void write(void* p, From from) {
  std::memcpy(p, &from, sizeof from);
}

template <class Sum>
inline Vector<Sum> broadcast(Sum value) {
  return value - Vector<Sum>{};  // not +, which would make 0 of -0
}

inline Vector<float> load(const float* p) { return read<Vector<float>>(p); }
inline Vector<double> load(const double* p) { return read<Vector<double>>(p); }
inline void store(float* p, Vector<float> v) { write(p, v); }
inline void store(double* p, Vector<double> v) { write(p, v); }

// Words below 2^16.
inline HalfWords narrow(Words words) {
#if MOE_PARALLEL_VECTOR_BYTES == 32
  const auto packed = _mm256_packus_epi32(bits_as<__m256i>(words), bits_as<__m256i>(words));
  return bits_as<HalfWords>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000)));
#else
  return __builtin_convertvector(words, HalfWords);
#endif
}

inline Vector<float> load(const BFloat16* p) {
  return bits_as<Vector<float>>(__builtin_convertvector(read<HalfWords>(p), Words) << 16);
}

#ifdef MOE_PARALLEL_ROUNDS_TO_BF16

// Takes what is smaller than the smallest normal number, 2^-126, as 0.
inline void store(BFloat16* p, Vector<float> v) { write(p, _mm512_cvtneps_pbh(v)); }

#else

inline void store(BFloat16* p, Vector<float> v) {
  const Words bits = bits_as<Words>(v);
  const Words rounded = bits + 0x7fff + (bits >> 16 & 1);
  const Words kept = v == v ? rounded : bits | 0x400000;
  write(p, narrow(kept >> 16));
}

#endif

#if MOE_PARALLEL_VECTOR_BYTES == 64

// With zeros under a full mask: GCC warns of the undefined values under the plain ones' masks.
inline Vector<float> load(const Float16* p) {
  return _mm512_maskz_cvtph_ps(0xffff, read<__m256i>(p));
}
inline void store(Float16* p, Vector<float> v) {
  write(p, _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif MOE_PARALLEL_VECTOR_BYTES == 32

inline Vector<float> load(const Float16* p) { return _mm256_cvtph_ps(read<__m128i>(p)); }
inline void store(Float16* p, Vector<float> v) {
  write(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#else

// fp16 has 5 bits of exponent, biased by 15, and 10 of fraction; fp32 8, biased by 127, and 23.
// A product with 2^(127 - 15) moves the bias, of subnormal numbers too.
inline Vector<float> load(const Float16* p) {
  const Words half = __builtin_convertvector(read<HalfWords>(p), Words);
  const Words magnitude = (half & 0x7fff) << 13;
  const Words finite = bits_as<Words>(bits_as<Vector<float>>(magnitude) * 0x1p112f);
  const Words value = magnitude >= 0x7c00 << 13 ? magnitude | 0x7f800000 : finite;
  return bits_as<Vector<float>>(value | (half & 0x8000) << 16);
}

// Below 2^-14 the steps of fp16 are 2^-24, those of fp32 near 0.5: a sum with 0.5 rounds to them.
inline void store(Float16* p, Vector<float> v) {
  const Words sign = bits_as<Words>(v) >> 16 & 0x8000;
  const Words magnitude = bits_as<Words>(v) & 0x7fffffff;
  const Words normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  const Words subnormal =
      bits_as<Words>(bits_as<Vector<float>>(magnitude) + 0.5f) - bits_as<uint32_t>(0.5f);
  Words half = magnitude < 113u << 23 ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? 0x7c00 - Words{} : half;  // 65520 and more round to infinity
  half = magnitude > 0x7f800000 ? 0x7e00 - Words{} : half;
  write(p, narrow(half | sign));
}

#endif

// Brings what kVectors vectors are loaded from into the caches.
template <int kVectors, class Scalar>
inline void prefetch(const Scalar* p) {
  constexpr int64_t kLine = 64 / sizeof(Scalar);
  for (int64_t i = 0; i < kVectors * kLanes<sum_t<Scalar>>; i += kLine) __builtin_prefetch(p + i);
}

// Which lanes of a vector a step of for_columns() works on: all, or the first of them.
struct AllLanes {
  template <class Scalar>
  Vector<sum_t<Scalar>> load(const Scalar* p) const {
    return MOE_PARALLEL_CAPABILITY::load(p);
  }
  template <class Scalar>
  void store(Scalar* p, Vector<sum_t<Scalar>> v) const {
    MOE_PARALLEL_CAPABILITY::store(p, v);
  }
};

struct FirstLanes {
  int64_t count;

  template <class Scalar>
  Vector<sum_t<Scalar>> load(const Scalar* p) const {  // the others are 0
    Scalar lanes[kLanes<sum_t<Scalar>>] = {};
    std::memcpy(lanes, p, count * sizeof(Scalar));
    return MOE_PARALLEL_CAPABILITY::load(lanes);
  }
  template <class Scalar>
  void store(Scalar* p, Vector<sum_t<Scalar>> v) const {
    Scalar lanes[kLanes<sum_t<Scalar>>];
    MOE_PARALLEL_CAPABILITY::store(lanes, v);
    std::memcpy(p, lanes, count * sizeof(Scalar));
  }
};

// body(i, lanes) for every vector of columns that begins at column i.
template <class Sum, class Body>
inline void for_columns(int64_t columns, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes<Sum> <= columns; i += kLanes<Sum>) body(i, AllLanes{});
  if (i < columns) body(i, FirstLanes{columns - i});
}

// The sum of the lanes, halves first.
template <class Sum, int64_t kBytes = kVectorBytes>
inline Sum sum_of_lanes(typename VectorOf<Sum, kBytes>::type v) {
  if constexpr (kBytes == sizeof(Sum)) {
    return v[0];
  } else {
    struct Halves {
      typename VectorOf<Sum, kBytes / 2>::type low, high;
    };
    const auto halves = bits_as<Halves>(v);
    return sum_of_lanes<Sum, kBytes / 2>(halves.low + halves.high);
  }
}

// e^x within 1 ulp; infinity where that is beyond the largest float, and e^-86 below -86, which
// nobody who adds 1 to it can tell from 0. With x = n ln 2 + r it is 2^n e^r, and e^r a polynomial
// (minimax in relative error, 5e-9, for |r| <= ln 2 / 2).
inline Vector<float> exp(Vector<float> x) {
  constexpr float kLargest = 0x1.62e42ep6f;  // e^x rounds to the largest float
  constexpr float kLog2E = 0x1.715476p0f;
  constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;  // n kLn2High is exact
  constexpr float kRound = 0x1.8p23f;  // added, it leaves n in the lowest bits
  x = x < -86.0f ? broadcast(-86.0f) : x;
  const Vector<float> shifted = x * kLog2E + kRound;
  const Vector<float> n = shifted - kRound;
  const Vector<float> r = (x - n * kLn2High) - n * kLn2Low;
  Vector<float> p = 0x1.6a2352p-10f * r + 0x1.123a6cp-7f;
  p = p * r + 0x1.5558f4p-5f;
  p = p * r + 0x1.55549p-3f;
  p = p * r + 0x1.fffffcp-2f;
  p = p * (r * r) + r + 1.0f;
  p = bits_as<Vector<float>>(bits_as<Words>(p) + (bits_as<Words>(shifted) << 23));
  return x <= kLargest ? p : x + HUGE_VALF;  // NaN for NaN
}

inline Vector<double> exp(Vector<double> x) {
  for (int64_t i = 0; i < kLanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
