// The element types that the kernels support. Torch-free, so that CUDA sources can include it.
#pragma once

namespace moe_parallel {

enum class ScalarType { kFloat32, kFloat64, kBFloat16, kFloat16 };

// Sums, probs and norms are double for double and float for the rest.
template <class Scalar>
struct SumOf {
  using type = float;
};
template <>
struct SumOf<double> {
  using type = double;
};
template <class Scalar>
using sum_t = typename SumOf<Scalar>::type;

}  // namespace moe_parallel
