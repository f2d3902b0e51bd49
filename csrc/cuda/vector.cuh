// Rows are read and written 16 bytes at a time if addresses and lengths allow it, and element by
// element otherwise.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "../alignment.h"
#include "scalar.cuh"

namespace moe_parallel {

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

// Calls body(Scalar{}, kSize), where kSize is an integral_constant: the number of elements in a
// vector. `row_sizes` are in elements.
template <class Body>
void with_vectors(ScalarType type, std::initializer_list<const void*> addresses,
                  std::initializer_list<int64_t> row_sizes, const Body& body) {
  with_cuda_scalar(type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    constexpr int kSize = kVectorBytes / sizeof(Scalar);
    if (are_aligned(addresses, row_sizes, sizeof(Scalar))) {
      body(scalar, std::integral_constant<int, kSize>{});
    } else {
      body(scalar, std::integral_constant<int, 1>{});
    }
  });
}

}  // namespace moe_parallel
