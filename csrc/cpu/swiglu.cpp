#include "../swiglu.h"

#include <ATen/Parallel.h>

#include <cmath>

#include "loops.h"

namespace moe_parallel {
namespace {

template <class Scalar>
void activate_row(const Swiglu& task, int64_t row) {
  using Sum = sum_t<Scalar>;
  const auto* gate = static_cast<const Scalar*>(task.gate) + row * task.gate_stride;
  const auto* up = static_cast<const Scalar*>(task.up) + row * task.up_stride;
  auto* h = static_cast<Scalar*>(task.h) + row * task.width;
  const Sum p = task.probabilities ? static_cast<const Sum*>(task.probabilities)[row] : Sum{1};
  for (int64_t i = 0; i < task.width; ++i) {
    const Sum g = static_cast<Sum>(gate[i]);
    h[i] = static_cast<Scalar>(p * g / (1 + std::exp(-g)) * static_cast<Sum>(up[i]));
  }
}

template <class Scalar>
void differentiate_row(const SwigluBackward& task, int64_t row) {
  using Sum = sum_t<Scalar>;
  const auto* dh = static_cast<const Scalar*>(task.dh) + row * task.width;
  const auto* gate = static_cast<const Scalar*>(task.gate) + row * task.gate_stride;
  const auto* up = static_cast<const Scalar*>(task.up) + row * task.up_stride;
  auto* dgate = static_cast<Scalar*>(task.dgate) + row * task.dgate_stride;
  auto* dup = static_cast<Scalar*>(task.dup) + row * task.dup_stride;
  auto* h = task.h ? static_cast<Scalar*>(task.h) + row * task.width : nullptr;
  const Sum p = task.probabilities ? static_cast<const Sum*>(task.probabilities)[row] : Sum{1};
  Sum dp = 0;
  for (int64_t i = 0; i < task.width; ++i) {
    const Sum g = static_cast<Sum>(gate[i]), u = static_cast<Sum>(up[i]);
    const Sum sigmoid = 1 / (1 + std::exp(-g));
    const Sum silu = g * sigmoid;
    const Sum d = static_cast<Sum>(dh[i]);
    dp += d * silu * u;
    dgate[i] = static_cast<Scalar>(p * d * u * sigmoid * (1 + g * (1 - sigmoid)));
    dup[i] = static_cast<Scalar>(p * d * silu);
    if (h) h[i] = static_cast<Scalar>(p * silu * u);
  }
  if (task.dprobabilities) static_cast<Sum*>(task.dprobabilities)[row] = dp;
}

}  // namespace

void run_on_cpu(const Swiglu& task) {
  with_scalar(task.type, [&](auto scalar) {
    at::parallel_for(0, task.rows, grain_of(task.width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) activate_row<decltype(scalar)>(task, row);
    });
  });
}

void run_on_cpu(const SwigluBackward& task) {
  with_scalar(task.type, [&](auto scalar) {
    at::parallel_for(0, task.rows, grain_of(task.width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) differentiate_row<decltype(scalar)>(task, row);
    });
  });
}

}  // namespace moe_parallel
