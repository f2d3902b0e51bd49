// Loops over one row that compilers turn into vector instructions.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>

#include "../scalar_type.h"

namespace moe_parallel {

constexpr int64_t kElementsPerTask = 32768;  // as in ATen: below this a thread costs more

// How many rows make a task worth a thread.
inline int64_t grain_of(int64_t elements_per_row) {
  return std::max<int64_t>(kElementsPerTask / std::max<int64_t>(elements_per_row, 1), 1);
}

// body(Scalar{}) with the C++ type that the name stands for.
template <class Body>
void with_scalar(ScalarType type, const Body& body) {
  switch (type) {
    case ScalarType::kFloat32:
      return body(float{});
    case ScalarType::kFloat64:
      return body(double{});
    case ScalarType::kBFloat16:
      return body(c10::BFloat16{});
    case ScalarType::kFloat16:
      return body(c10::Half{});
  }
}

// The sum of a[i] * b[i], in 16 interleaved partial sums: a single one would be a chain of
// additions, which the compiler may not reorder.
template <class Scalar>
sum_t<Scalar> dot(const Scalar* a, const Scalar* b, int64_t size) {
  using Sum = sum_t<Scalar>;
  constexpr int64_t kLanes = 16;
  Sum partial[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      partial[lane] += static_cast<Sum>(a[i + lane]) * static_cast<Sum>(b[i + lane]);
    }
  }
  for (int64_t lane = 0; i < size; ++i, ++lane) {
    partial[lane] += static_cast<Sum>(a[i]) * static_cast<Sum>(b[i]);
  }
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) partial[lane] += partial[lane + width];
  }
  return partial[0];
}

// y[i] = factor * x[i]; y may be x.
template <class Scalar>
void scale(const Scalar* x, sum_t<Scalar> factor, Scalar* y, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    y[i] = static_cast<Scalar>(factor * static_cast<sum_t<Scalar>>(x[i]));
  }
}

// sum[i] += factor * x[i]
template <class Scalar>
void add_scaled(const Scalar* x, sum_t<Scalar> factor, sum_t<Scalar>* sum, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    sum[i] += factor * static_cast<sum_t<Scalar>>(x[i]);
  }
}

// y[i] = sum[i], rounded.
template <class Scalar>
void round_to(const sum_t<Scalar>* sum, Scalar* y, int64_t size) {
  for (int64_t i = 0; i < size; ++i) y[i] = static_cast<Scalar>(sum[i]);
}

}  // namespace moe_parallel
