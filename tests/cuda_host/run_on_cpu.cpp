// Runs every task with the kernels of csrc/cuda. This library is loaded before the extension, so
// its functions are used instead of the extension's functions with the same names.
#include "expert_merge.h"
#include "fused_product.h"
#include "grouped_gemm_product.h"
#include "norm_topk.h"
#include "permute.h"
#include "rotary.h"
#include "routing_map.h"
#include "softmax.h"
#include "swiglu.h"
#include "unpermute.h"

namespace moe_parallel {
namespace {

int64_t tasks_run = 0, products_fused = 0, gates_fused = 0;

template <class Task>
void run(const Task& task) {
  ++tasks_run;
  run_on_cuda(task, nullptr);
}

template <class Rows>
bool run_fused(const FusedProduct* product, const Rows* epilogue) {
  if (!can_fuse(*product, *epilogue)) return false;
  ++products_fused;
  gates_fused +=
      std::is_same_v<Rows, ActivateGateRows> || std::is_same_v<Rows, DifferentiateGateRows>;
  run_on_cuda(*product, *epilogue, nullptr);
  return true;
}

}  // namespace

bool run_on_cpu(const FusedProduct& product, const Epilogue& epilogue) {
  return std::visit([&](const auto& rows) { return run_fused(&product, &rows); }, epilogue);
}
void run_on_cpu(const CountChoices& task) { run(task); }
void run_on_cpu(const ExpertMerge& task) { run(task); }
void run_on_cpu(const ExpertMergeBackward& task) { run(task); }
void run_on_cpu(const FindRows& task) { run(task); }
void run_on_cpu(const NormGradient& task) { run(task); }
void run_on_cpu(const Permute& task) { run(task); }
void run_on_cpu(const PlaceChoices& task) { run(task); }
void run_on_cpu(const Rotary& task) { run(task); }
void run_on_cpu(const ScoreTokens& task) { run(task); }
void run_on_cpu(const SoftmaxGradient& task) { run(task); }
void run_on_cpu(const SoftmaxSums& task) { run(task); }
void run_on_cpu(const Swiglu& task) { run(task); }
void run_on_cpu(const SwigluBackward& task) { run(task); }
void run_on_cpu(const Unpermute& task) { run(task); }
void run_on_cpu(const UnpermuteBackward& task) { run(task); }

}  // namespace moe_parallel

// For Python.
extern "C" {
void emulate_gpu(int capability_major) { cuda_host::capability_major = capability_major; }
void grant_shared_memory(bool grants) { cuda_host::grants_shared_memory = grants; }
bool store_rows(const moe_parallel::FusedProduct* product, const moe_parallel::StoreRows* task) {
  return moe_parallel::run_fused(product, task);
}
bool activate_rows(const moe_parallel::FusedProduct* product,
                   const moe_parallel::ActivateRows* task) {
  return moe_parallel::run_fused(product, task);
}
bool square_rows(const moe_parallel::FusedProduct* product, const moe_parallel::SquareRows* task) {
  return moe_parallel::run_fused(product, task);
}
bool differentiate_rows(const moe_parallel::FusedProduct* product,
                        const moe_parallel::DifferentiateRows* task) {
  return moe_parallel::run_fused(product, task);
}
bool activate_gate_rows(const moe_parallel::FusedProduct* product,
                        const moe_parallel::ActivateGateRows* task) {
  return moe_parallel::run_fused(product, task);
}
bool differentiate_gate_rows(const moe_parallel::FusedProduct* product,
                             const moe_parallel::DifferentiateGateRows* task) {
  return moe_parallel::run_fused(product, task);
}
int64_t tasks_run() { return moe_parallel::tasks_run; }
int64_t products_fused() { return moe_parallel::products_fused; }
int64_t gates_fused() { return moe_parallel::gates_fused; }
void count_choices(const moe_parallel::CountChoices* task) { run_on_cpu(*task); }
void find_rows(const moe_parallel::FindRows* task) { run_on_cpu(*task); }
void place_choices(const moe_parallel::PlaceChoices* task) { run_on_cpu(*task); }
void score_tokens(const moe_parallel::ScoreTokens* task) { run_on_cpu(*task); }
void group_offsets(const moe_parallel::GroupOffsets* task) { run_on_cuda(*task, nullptr); }
void grouped_product(const moe_parallel::GroupedProduct* task) { run_on_cuda(*task, nullptr); }
}
