#include "../norm_topk.h"

#include <ATen/Parallel.h>

#include <cmath>

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

void run_on_cpu(const GroupScale& task) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    auto* c = static_cast<Scalar*>(task.c);
    const auto* factors = static_cast<const sum_t<Scalar>*>(task.factors);
    const int64_t groups = task.tokens * task.num_experts;
    at::parallel_for(0, groups, grain_of(task.rank), [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) {
        Scalar* row = c + group * task.rank;
        scale(row, factors[group], row, task.rank);
      }
    });
  });
}

void run_on_cpu(const SelectTopK& task) {
  with_scalar(task.type, [&](auto scalar) {
    using Norm = sum_t<decltype(scalar)>;
    const auto* norms = static_cast<const Norm*>(task.norms);
    const int64_t grain = grain_of(task.num_experts * task.k);
    at::parallel_for(0, task.tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        select_topk(norms + token * task.num_experts, task.num_experts, task.k,
                    task.experts + token * task.k);
      }
    });
  });
}

}  // namespace moe_parallel
