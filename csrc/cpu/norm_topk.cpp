#include "../norm_topk.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <cstring>

#include "loops.h"

namespace moe_parallel {

void run_on_cpu(const GroupNorms& task) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const auto* c = static_cast<const Scalar*>(task.c);
    auto* norms = static_cast<sum_t<Scalar>*>(task.norms);
    const int64_t groups = task.tokens * task.num_experts;
    at::parallel_for(0, groups, grain_of(task.rank), [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) {
        const Scalar* row = c + group * task.rank;
        norms[group] = std::sqrt(dot(row, row, task.rank));
      }
    });
  });
}

void run_on_cpu(const SelectTopK& task) {
  with_scalar(task.type, [&](auto scalar) {
    using Norm = sum_t<decltype(scalar)>;
    const auto* norms = static_cast<const Norm*>(task.norms);
    const auto* bias = static_cast<const Norm*>(task.bias);
    const int64_t grain = grain_of(task.num_experts * task.k);
    at::parallel_for(0, task.tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        select_topk(norms + token * task.num_experts, bias, task.num_experts, task.k,
                    task.experts + token * task.k);
      }
    });
  });
}

void run_on_cpu(const KeepChosen& task) {
  const auto* c = static_cast<const char*>(task.c);
  auto* kept = static_cast<char*>(task.kept);
  const int64_t grain = grain_of(task.k * task.row_bytes);
  at::parallel_for(0, task.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t choice = begin * task.k; choice < end * task.k; ++choice) {
      const int64_t group = choice / task.k * task.num_experts + task.experts[choice];
      std::memcpy(kept + choice * task.row_bytes, c + group * task.row_bytes, task.row_bytes);
    }
  });
}

void run_on_cpu(const NormGradient& task) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    const auto* c = static_cast<const Scalar*>(task.c);
    const auto* factors = static_cast<const Sum*>(task.factors);
    const auto* dkept = static_cast<const Scalar*>(task.dkept);
    auto* dc = static_cast<Scalar*>(task.dc);
    const int64_t grain = grain_of(task.num_experts * task.rank);
    at::parallel_for(0, task.tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        for (int64_t e = 0; e < task.num_experts; ++e) {
          const int64_t group = token * task.num_experts + e;
          const Scalar* row = c + group * task.rank;
          const Scalar* d = nullptr;
          for (int64_t j = 0; dkept && j < task.k; ++j) {
            if (task.experts[token * task.k + j] == e) d = dkept + (token * task.k + j) * task.rank;
          }
          for (int64_t i = 0; i < task.rank; ++i) {
            Sum sum = factors[group] * static_cast<Sum>(row[i]);
            if (d) sum += static_cast<Sum>(d[i]);
            dc[group * task.rank + i] = static_cast<Scalar>(sum);
          }
        }
      }
    });
  });
}

}  // namespace moe_parallel
