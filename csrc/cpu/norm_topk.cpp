#include "../norm_topk.h"

#include <ATen/Parallel.h>

#include <cstring>

#include "capability.h"
#include "parts.h"

namespace moe_parallel {

void run_on_cpu(const GroupNorms& task) {
  in_parts(task.tokens * task.num_experts, task.rank, kernels().group_norms, task);
}

void run_on_cpu(const SelectTopK& task) {
  if (task.k == 0) return;
  in_parts(task.tokens, task.num_experts * task.k, kernels().select_topk, task);
}

void run_on_cpu(const PickChosen& task) {
  const auto* c = static_cast<const char*>(task.c_TER);
  auto* c_TKR = static_cast<char*>(task.c_TKR);
  const int64_t grain = grain_of(task.k * task.row_bytes);
  at::parallel_for(0, task.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t choice = begin * task.k; choice < end * task.k; ++choice) {
      const int64_t expert = task.experts[choice];
      TORCH_CHECK_INDEX(0 <= expert && expert < task.num_experts, "expert ", expert, " is none of ",
                        task.num_experts, " experts");
      const int64_t group = choice / task.k * task.num_experts + expert;
      std::memcpy(c_TKR + choice * task.row_bytes, c + group * task.row_bytes, task.row_bytes);
    }
  });
}

void run_on_cpu(const ScoreTokens& task) {
  run_on_cpu(GroupNorms{.type = task.type,
                        .c_TER = task.c_TER,
                        .norms = task.norms,
                        .tokens = task.tokens,
                        .num_experts = task.num_experts,
                        .rank = task.rank});
  const bool is_double = task.type == ScalarType::kFloat64;
  run_on_cpu(SelectTopK{.type = is_double ? ScalarType::kFloat64 : ScalarType::kFloat32,
                        .norms = task.norms,
                        .bias = task.bias,
                        .experts = task.experts,
                        .tokens = task.tokens,
                        .num_experts = task.num_experts,
                        .k = task.k});
  if (!task.c_TKR) return;
  run_on_cpu(PickChosen{.c_TER = task.c_TER,
                        .experts = task.experts,
                        .c_TKR = task.c_TKR,
                        .tokens = task.tokens,
                        .num_experts = task.num_experts,
                        .k = task.k,
                        .row_bytes = task.row_bytes});
}

bool run_on_cpu(const SumSquares&) { return false; }

void run_on_cpu(const NormGradient& task) {
  in_parts(task.tokens, task.num_experts * task.rank, kernels().norm_gradient, task);
}

}  // namespace moe_parallel
