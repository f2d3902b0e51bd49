// Rows are read and written 16 bytes at a time where addresses and lengths allow it, and element
// by element where they do not.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "scalar.cuh"

namespace moe_parallel {

constexpr int64_t kVectorBytes = 16;

template <class Scalar, int kSize>
struct alignas(sizeof(Scalar) * kSize) Vector {
  Scalar elements[kSize];
};

template <class Scalar, int kSize>
__device__ inline Vector<Scalar, kSize> load(const Scalar* row, int64_t vector) {
  return reinterpret_cast<const Vector<Scalar, kSize>*>(row)[vector];
}

template <class Scalar, int kSize>
__device__ inline void store(const Vector<Scalar, kSize>& x, Scalar* row, int64_t vector) {
  reinterpret_cast<Vector<Scalar, kSize>*>(row)[vector] = x;
}

// sums[i] += factor * x[i]
template <class Scalar, int kSize>
__device__ inline void add_scaled(const Vector<Scalar, kSize>& x, sum_t<Scalar> factor,
                                  sum_t<Scalar> (&sums)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) sums[i] += factor * to_sum(x.elements[i]);
}

template <class Scalar, int kSize>
__device__ inline Vector<Scalar, kSize> round_to(const sum_t<Scalar> (&sums)[kSize]) {
  Vector<Scalar, kSize> x;
#pragma unroll
  for (int i = 0; i < kSize; ++i) x.elements[i] = from_sum<Scalar>(sums[i]);
  return x;
}

template <class Scalar, int kSize>
__device__ inline sum_t<Scalar> dot(const Vector<Scalar, kSize>& x,
                                    const Vector<Scalar, kSize>& y) {
  sum_t<Scalar> sum = 0;
#pragma unroll
  for (int i = 0; i < kSize; ++i) sum += to_sum(x.elements[i]) * to_sum(y.elements[i]);
  return sum;
}

// Whether every address, and every distance between rows, is a multiple of a vector. A null
// pointer, which stands for what is not there, is one.
inline bool are_aligned(std::initializer_list<const void*> addresses,
                        std::initializer_list<int64_t> row_bytes) {
  for (const void* address : addresses) {
    if (reinterpret_cast<uintptr_t>(address) % kVectorBytes != 0) return false;
  }
  for (int64_t bytes : row_bytes) {
    if (bytes % kVectorBytes != 0) return false;
  }
  return true;
}

// body(Scalar{}, integral_constant of the elements in a vector); `row_sizes` in elements.
template <class Body>
void with_vectors(ScalarType type, std::initializer_list<const void*> addresses,
                  std::initializer_list<int64_t> row_sizes, const Body& body) {
  with_cuda_scalar(type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    constexpr int kSize = kVectorBytes / sizeof(Scalar);
    bool aligned = are_aligned(addresses, {});
    for (int64_t size : row_sizes) aligned = aligned && size % kSize == 0;
    if (aligned) {
      body(scalar, std::integral_constant<int, kSize>{});
    } else {
      body(scalar, std::integral_constant<int, 1>{});
    }
  });
}

}  // namespace moe_parallel
