// Runs every task with the kernels of csrc/cuda. This library is loaded before the extension, so
// its functions are used instead of the extension's functions with the same names.
#include "expert_merge.h"
#include "grouped_gemm_product.h"
#include "norm_topk.h"
#include "packed_rows.h"
#include "permute.h"
#include "rotary.h"
#include "routing_map.h"
#include "softmax.h"
#include "swiglu.h"
#include "unpermute.h"

namespace moe_parallel {
namespace {

int64_t tasks_run = 0, squares_summed = 0;

template <class Task>
void run(const Task& task) {
  ++tasks_run;
  run_on_cuda(task, nullptr);
}

}  // namespace

void run_on_cpu(const CountChoices& task) { run(task); }
void run_on_cpu(const ExpertMerge& task) { run(task); }
void run_on_cpu(const ExpertMergeBackward& task) { run(task); }
void run_on_cpu(const FindRows& task) { run(task); }
void run_on_cpu(const FindVisits& task) { run(task); }
void run_on_cpu(const NormGradient& task) { run(task); }
void run_on_cpu(const Permute& task) { run(task); }
void run_on_cpu(const PlaceChoices& task) { run(task); }
void run_on_cpu(const ReadEnds& task) { run(task); }
void run_on_cpu(const Rotary& task) { run(task); }
void run_on_cpu(const ScoreTokens& task) { run(task); }
void run_on_cpu(const SoftmaxGradient& task) { run(task); }
void run_on_cpu(const SoftmaxSums& task) { run(task); }
bool run_on_cpu(const SumSquares& task) {
  const bool has_run = run_on_cuda(task, nullptr);
  squares_summed += has_run;
  return has_run;
}
void run_on_cpu(const Swiglu& task) { run(task); }
void run_on_cpu(const SwigluBackward& task) { run(task); }
void run_on_cpu(const Unpermute& task) { run(task); }
void run_on_cpu(const UnpermuteBackward& task) { run(task); }
void run_on_cpu(const WriteEnds& task) { run(task); }

}  // namespace moe_parallel

// For Python.
extern "C" {
void emulate_gpu(int capability_major) { cuda_host::capability_major = capability_major; }
void grant_shared_memory(bool grants) { cuda_host::grants_shared_memory = grants; }
int64_t tasks_run() { return moe_parallel::tasks_run; }
int64_t squares_summed() { return moe_parallel::squares_summed; }
void count_choices(const moe_parallel::CountChoices* task) { run_on_cpu(*task); }
void find_rows(const moe_parallel::FindRows* task) { run_on_cpu(*task); }
void place_choices(const moe_parallel::PlaceChoices* task) { run_on_cpu(*task); }
bool sum_squares(const moe_parallel::SumSquares* task) { return run_on_cpu(*task); }
void score_tokens(const moe_parallel::ScoreTokens* task) { run_on_cpu(*task); }
void group_offsets(const moe_parallel::GroupOffsets* task) { run_on_cuda(*task, nullptr); }
void grouped_product(const moe_parallel::GroupedProduct* task) { run_on_cuda(*task, nullptr); }
}
