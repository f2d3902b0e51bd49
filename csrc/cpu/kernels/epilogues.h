#pragma once

#include "../epilogues.h"
#include "swiglu.h"
#include "vectors.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

// What the sums become when they are stored and loaded again.
template <class Scalar, class Lanes>
inline Vector<float> rounded(Vector<float> sums, const Lanes& lanes) {
  Scalar stored[kLanes<float>];
  lanes.store(stored, sums);
  return lanes.load(stored);
}

// Calls body(Scalar{}) for the types of packed products.
template <class Body>
inline void with_packed_scalar(ScalarType type, const Body& body) {
  type == ScalarType::kFloat32 ? body(float{}) : body(BFloat16{});
}

// The rows begin..end of a part.
inline void store_rows(const EpiloguePart<StoreRows>& part, int64_t begin, int64_t end) {
  with_packed_scalar(part.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    for (int64_t row = begin; row < end; ++row) {
      const float* sums = part.first + row * part.width;
      auto* d = static_cast<Scalar*>(part.epilogue.d) +
                (part.first_row + row) * part.epilogue.stride + part.first_column;
      for_columns<float>(part.width, [&](int64_t i, auto lanes) {
        const Vector<float> sum = lanes.load(sums + i);
        lanes.store(d + i, part.epilogue.accumulate ? lanes.load(d + i) + sum : sum);
      });
    }
  });
}

inline void activate_rows(const EpiloguePart<ActivateRows>& part, int64_t begin, int64_t end) {
  const auto& epilogue = part.epilogue;
  with_packed_scalar(part.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    for (int64_t row = begin; row < end; ++row) {
      const float *gates = part.first + row * part.width, *ups = part.second + row * part.width;
      const int64_t n = part.first_row + row;
      const int64_t kept = n * epilogue.stride + part.first_column;
      auto* gate = epilogue.gate ? static_cast<Scalar*>(epilogue.gate) + kept : nullptr;
      auto* up = static_cast<Scalar*>(epilogue.up) + kept;
      auto* h = static_cast<Scalar*>(epilogue.h) + n * part.columns + part.first_column;
      const float p = epilogue.probs ? epilogue.probs[n] : 1;
      for_columns<float>(part.width, [&](int64_t i, auto lanes) {
        if (gate) prefetch<1>(gate + epilogue.stride + i);
        prefetch<1>(up + epilogue.stride + i);
        prefetch<1>(h + part.columns + i);
        const auto g = rounded<Scalar>(lanes.load(gates + i), lanes);
        const auto u = rounded<Scalar>(lanes.load(ups + i), lanes);
        if (gate) lanes.store(gate + i, g);
        lanes.store(up + i, u);
        lanes.store(h + i, activated(p, g, u));
      });
    }
  });
}

// The gradients of one row of a part, where loads(i, lanes) returns its dh and gate.
template <class Scalar, class Rows, class Loads>
inline void differentiate_row(const EpiloguePart<Rows>& part, int64_t n, const Scalar* up,
                              int64_t up_stride, int64_t kept, int64_t dstride,
                              const Loads& loads) {
  const auto& epilogue = part.epilogue;
  auto* dgate = static_cast<Scalar*>(epilogue.dgate) + kept;
  auto* dup = static_cast<Scalar*>(epilogue.dup) + kept;
  auto* h = static_cast<Scalar*>(epilogue.h) + n * part.columns + part.first_column;
  const float p = epilogue.probs ? epilogue.probs[n] : 1;
  Vector<float> dp = {};
  for_columns<float>(part.width, [&](int64_t i, auto lanes) {
    prefetch<1>(up + up_stride + i);
    prefetch<1>(dgate + dstride + i);
    prefetch<1>(dup + dstride + i);
    prefetch<1>(h + part.columns + i);
    const auto [d, g] = loads(i, lanes);
    const auto of = differentiated(p, d, g, lanes.load(up + i));
    dp += of.dp;
    lanes.store(dgate + i, of.dgate);
    lanes.store(dup + i, of.dup);
    lanes.store(h + i, of.h);
  });
  const int64_t chunks = (part.columns + kColumnsOfSum - 1) / kColumnsOfSum;
  float* sums = epilogue.dprobs + n * chunks + part.first_column / kColumnsOfSum;
  for (int64_t i = 0; i * kColumnsOfSum < part.width; ++i) sums[i] = 0;
  sums[0] = sum_of_lanes<float>(dp);
}

struct GradientAndGate {
  Vector<float> dh, gate;
};

inline void differentiate_rows(const EpiloguePart<DifferentiateRows>& part, int64_t begin,
                               int64_t end) {
  const auto& epilogue = part.epilogue;
  with_packed_scalar(part.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t n = part.first_row + row, at = n * epilogue.stride + part.first_column;
      const auto* gate = static_cast<const Scalar*>(epilogue.gate) + at;
      const auto* up = static_cast<const Scalar*>(epilogue.up) + at;
      const float* dh = part.first + row * part.width;
      differentiate_row<Scalar>(part, n, up, epilogue.stride,
                                n * epilogue.dstride + part.first_column, epilogue.dstride,
                                [&](int64_t i, auto lanes) {
                                  prefetch<1>(gate + epilogue.stride + i);
                                  return GradientAndGate{rounded<Scalar>(lanes.load(dh + i), lanes),
                                                         lanes.load(gate + i)};
                                });
    }
  });
}

inline void differentiate_gate_rows(const EpiloguePart<DifferentiateGateRows>& part, int64_t begin,
                                    int64_t end) {
  with_packed_scalar(part.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t n = part.first_row + row, at = n * part.columns + part.first_column;
      const float *gate = part.first + row * part.width, *dh = part.second + row * part.width;
      differentiate_row<Scalar>(part, n, static_cast<const Scalar*>(part.epilogue.up) + at,
                                part.columns, at, part.columns, [&](int64_t i, auto lanes) {
                                  return GradientAndGate{
                                      rounded<Scalar>(lanes.load(dh + i), lanes),
                                      rounded<Scalar>(lanes.load(gate + i), lanes)};
                                });
    }
  });
}

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
