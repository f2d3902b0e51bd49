// Vectors of sums. A vector has as many floats or doubles as a register of this capability holds.
//
// The compiler supports arithmetic, comparisons and `mask ? a : b` on vector types. This file has
// the other operations. Rows of bf16 and fp16 are converted to float when they are loaded, and
// rounded when they are stored (to nearest even; NaN stays NaN).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if MOE_PARALLEL_VECTOR_BYTES > 16
#include <immintrin.h>
#endif

#include "../../alignment.h"
#include "../../scalar_type.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

constexpr int64_t kRegisterBytes = MOE_PARALLEL_VECTOR_BYTES;

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Calls body(Scalar{}) with the C++ type for the enumerator.
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
using Vector = typename VectorOf<Sum, kRegisterBytes>::type;
using Words = Vector<uint32_t>;
using HalfWords = typename VectorOf<uint16_t, kRegisterBytes / 2>::type;

template <class Sum>
constexpr int64_t kLanes = kRegisterBytes / static_cast<int64_t>(sizeof(Sum));

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
  return value - Vector<Sum>{};  // not +, which would turn -0 into 0
}

#if MOE_PARALLEL_VECTOR_BYTES > 16

// Stores past the caches: a line of 64 bytes that consecutive stores fill goes to memory without
// being read first. `p` is aligned to the size of the value.
template <class Value>
inline void stream(void* p, Value value) {
  if constexpr (sizeof(Value) == 64) {
    _mm512_stream_si512(static_cast<__m512i*>(p), bits_as<__m512i>(value));
  } else if constexpr (sizeof(Value) == 32) {
    _mm256_stream_si256(static_cast<__m256i*>(p), bits_as<__m256i>(value));
  } else {
    _mm_stream_si128(static_cast<__m128i*>(p), bits_as<__m128i>(value));
  }
}

// Other threads see what was streamed before what is stored after this call.
inline void end_stream() { _mm_sfence(); }

#else

template <class Value>
inline void stream(void* p, Value value) {
  write(p, value);
}
inline void end_stream() {}

#endif

inline Vector<float> load(const float* p) { return read<Vector<float>>(p); }
inline Vector<double> load(const double* p) { return read<Vector<double>>(p); }
inline void store(float* p, Vector<float> v) { write(p, v); }
inline void store(double* p, Vector<double> v) { write(p, v); }

inline Words wide(const void* half_words) {
  return __builtin_convertvector(read<HalfWords>(half_words), Words);
}

// The words of two rows of 16-bit numbers: the first row's in the lower halves.
inline Words pairs_of(const uint16_t* first, const uint16_t* second) {
  return wide(first) | wide(second) << 16;
}

// The words must be below 2^16.
inline HalfWords narrow(Words words) {
#if MOE_PARALLEL_VECTOR_BYTES == 32
  const auto packed = _mm256_packus_epi32(bits_as<__m256i>(words), bits_as<__m256i>(words));
  return bits_as<HalfWords>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000)));
#else
  return __builtin_convertvector(words, HalfWords);
#endif
}

inline Vector<float> load(const BFloat16* p) { return bits_as<Vector<float>>(wide(p) << 16); }

#ifdef MOE_PARALLEL_ROUNDS_TO_BF16

// Numbers smaller than the smallest normal number, 2^-126, become 0.
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

// The maskz intrinsics with a full mask are used because GCC warns of undefined values in the ones
// without a mask.
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

// fp16 has 5 bits of exponent, with a bias of 15, and 10 bits of fraction. fp32 has 8 bits of
// exponent, with a bias of 127, and 23 bits of fraction. A product with 2^(127 - 15) corrects the
// bias, for subnormal numbers too.
inline Vector<float> load(const Float16* p) {
  const Words half = wide(p);
  const Words magnitude = (half & 0x7fff) << 13;
  const Words finite = bits_as<Words>(bits_as<Vector<float>>(magnitude) * 0x1p112f);
  const Words value = magnitude >= 0x7c00 << 13 ? magnitude | 0x7f800000 : finite;
  return bits_as<Vector<float>>(value | (half & 0x8000) << 16);
}

// Below 2^-14 the spacing of fp16 numbers is 2^-24. Near 0.5 the spacing of fp32 numbers is the
// same, so the addition of 0.5 rounds to it.
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

// The lanes of a vector that a step of for_columns() works on: all lanes, or the first ones.
struct AllLanes {
  static constexpr bool kPastCaches = false;

  template <class Scalar>
  Vector<sum_t<Scalar>> load(const Scalar* p) const {
    return MOE_PARALLEL_CAPABILITY::load(p);
  }
  template <class Scalar>
  void store(Scalar* p, Vector<sum_t<Scalar>> v) const {
    MOE_PARALLEL_CAPABILITY::store(p, v);
  }
};

// All lanes, stored past the caches.
struct StreamedLanes : AllLanes {
  static constexpr bool kPastCaches = true;

  template <class Scalar>
  void store(Scalar* p, Vector<sum_t<Scalar>> v) const {
    constexpr int64_t kBytes = kLanes<sum_t<Scalar>> * static_cast<int64_t>(sizeof(Scalar));
    Scalar lanes[kLanes<sum_t<Scalar>>];
    MOE_PARALLEL_CAPABILITY::store(lanes, v);
    stream(p, read<typename VectorOf<uint8_t, kBytes>::type>(lanes));
  }
};

constexpr int kToL1 = 3, kToL2 = 2;  // where a prefetch ends

// Prefetches the memory of kVectors vectors.
template <int kVectors, int kWhere = kToL1, class Scalar>
inline void prefetch(const Scalar* p) {
  constexpr int64_t kLine = kCacheLine / sizeof(Scalar);
  for (int64_t i = 0; i < kVectors * kLanes<sum_t<Scalar>>; i += kLine) {
    __builtin_prefetch(p + i, /*to write=*/0, kWhere);
  }
}

// Calls body(StreamedLanes{}) or body(AllLanes{}).
template <class Body>
inline void with_stores(bool past_caches, const Body& body) {
  if (!past_caches) return body(AllLanes{});
  body(StreamedLanes{});
  end_stream();
}

struct FirstLanes {
  static constexpr bool kPastCaches = false;

  int64_t count;

  template <class Scalar>
  Vector<sum_t<Scalar>> load(const Scalar* p) const {  // the other lanes are 0
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

// Calls body(i, lanes) for every vector of columns. It begins at column i.
template <class Sum, class Lanes = AllLanes, class Body>
inline void for_columns(int64_t columns, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes<Sum> <= columns; i += kLanes<Sum>) body(i, Lanes{});
  if (i < columns) body(i, FirstLanes{columns - i});
}

// The sum of the lanes. The two halves of the vector are added first.
template <class Sum, int64_t kBytes = kRegisterBytes>
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

// Lane i of the result is first + i.
template <class Sum>
inline Vector<Sum> counted_from(int64_t first) {
  Vector<Sum> numbers;
  for (int64_t i = 0; i < kLanes<Sum>; ++i) numbers[i] = static_cast<Sum>(first + i);
  return numbers;
}

template <class Sum>
inline Sum largest_of_lanes(Vector<Sum> v) {
  Sum largest = v[0];
  for (int64_t i = 1; i < kLanes<Sum>; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

// Lane by lane the larger number; that of b if either is NaN.
template <class Sum>
inline Vector<Sum> larger_lanes(Vector<Sum> a, Vector<Sum> b) {
  return a > b ? a : b;
}

// e^x within 1 ulp. The result is infinity if e^x exceeds the largest float. Below -86 it is e^-86,
// which equals 0 once 1 is added. With x = n ln 2 + r, e^x is 2^n e^r, and e^r is approximated by a
// polynomial (minimax in relative error, 5e-9, for |r| <= ln 2 / 2).
inline Vector<float> exp(Vector<float> x) {
  constexpr float kLargest = 0x1.62e42ep6f;  // e^x rounds to the largest float
  constexpr float kLog2E = 0x1.715476p0f;
  constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;  // n kLn2High is exact
  constexpr float kRound = 0x1.8p23f;  // adding it leaves n in the lowest bits
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
