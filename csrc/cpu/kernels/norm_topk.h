#pragma once

#include "../../norm_topk.h"
#include "vectors.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

// Computes the norms of the groups begin..end. There are tokens * num_experts groups.
inline void group_norms(const GroupNorms& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    for (int64_t group = begin; group < end; ++group) {
      const auto* row = static_cast<const Scalar*>(task.c_TER) + group * task.rank;
      Vector<Sum> squares = {};
      for_columns<Sum>(task.rank, [&](int64_t i, auto lanes) {
        const Vector<Sum> v = lanes.load(row + i);
        squares += v * v;
      });
      static_cast<Sum*>(task.norms)[group] = std::sqrt(sum_of_lanes<Sum>(squares));
    }
  });
}

// An integer in the order of the norms: NaN is the largest, as in torch.sort, and -0 equals 0.
inline int32_t order_of(float norm) {
  const auto bits = bits_as<int32_t>(norm + 0.0f);
  return norm != norm ? INT32_MAX : bits < 0 ? bits ^ INT32_MAX : bits;
}
inline int64_t order_of(double norm) {
  const auto bits = bits_as<int64_t>(norm + 0.0);
  return norm != norm ? INT64_MAX : bits < 0 ? bits ^ INT64_MAX : bits;
}

// An insertion sort. The experts are inserted in ascending order of their index, and move up only
// past smaller scores, so a tie keeps the lower index first.
template <class Norm>
inline void select_of_token(const SelectTopK& task, int64_t token) {
  const auto* norms = static_cast<const Norm*>(task.norms) + token * task.num_experts;
  const auto* bias = static_cast<const Norm*>(task.bias);
  int64_t* chosen = task.experts + token * task.k;
  const auto order = [&](int64_t e) { return order_of(bias ? norms[e] + bias[e] : norms[e]); };
  auto last = order(0);
  int64_t count = 0;
  for (int64_t e = 0; e < task.num_experts; ++e) {
    const auto own = order(e);
    if (count == task.k && own <= last) continue;
    int64_t place = count < task.k ? count++ : count - 1;
    for (; place > 0 && own > order(chosen[place - 1]); --place) chosen[place] = chosen[place - 1];
    chosen[place] = e;
    last = order(chosen[count - 1]);
  }
}

inline void select_topk(const SelectTopK& task, int64_t begin, int64_t end) {
  const bool is_double = task.type == ScalarType::kFloat64;
  for (int64_t token = begin; token < end; ++token) {
    is_double ? select_of_token<double>(task, token) : select_of_token<float>(task, token);
  }
}

// The row of dc_TKR for expert e of the token, or null.
template <class Scalar>
inline const Scalar* gradient_of_chosen(const NormGradient& task, int64_t token, int64_t e) {
  const Scalar* dc_TKR = nullptr;
  for (int64_t j = 0; task.dc_TKR && j < task.k; ++j) {
    const int64_t choice = token * task.k + j;
    if (task.experts[choice] == e) {
      dc_TKR = static_cast<const Scalar*>(task.dc_TKR) + choice * task.rank;
    }
  }
  return dc_TKR;
}

inline void norm_gradient(const NormGradient& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    for (int64_t group = begin * task.num_experts; group < end * task.num_experts; ++group) {
      const auto* c = static_cast<const Scalar*>(task.c_TER) + group * task.rank;
      auto* dc = static_cast<Scalar*>(task.dc_TER) + group * task.rank;
      const Sum factor = static_cast<const Sum*>(task.factors)[group];
      const auto* dc_TKR =
          gradient_of_chosen<Scalar>(task, group / task.num_experts, group % task.num_experts);
      for_columns<Sum>(task.rank, [&](int64_t i, auto lanes) {
        Vector<Sum> sum = factor * lanes.load(c + i);
        if (dc_TKR) sum += lanes.load(dc_TKR + i);
        lanes.store(dc + i, sum);
      });
    }
  });
}

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
