#include "../norm_topk.h"
#include "reduce.cuh"
#include "vector.cuh"

namespace moe_parallel {
namespace {

// The row of dc_chosen that belongs to a group, or -1.
__device__ inline int64_t chosen_row(const NormGradient& task, int64_t group) {
  const int64_t token = group / task.num_experts, expert = group % task.num_experts;
  int64_t row = -1;
  for (int64_t choice = token * task.k; choice < (token + 1) * task.k; ++choice) {
    if (task.experts[choice] == expert) row = choice;
  }
  return row;
}

// `lanes` lanes a group. Every element is read by the lane that writes it: dc may be c.
template <class Scalar, int kSize>
__global__ void norm_gradient(NormGradient task, int lanes) {
  using Sum = sum_t<Scalar>;
  const auto* c = static_cast<const Scalar*>(task.c);
  const auto* dc_chosen = static_cast<const Scalar*>(task.dc_chosen);
  auto* dc = static_cast<Scalar*>(task.dc);
  const int64_t groups = task.tokens * task.num_experts;
  const int64_t stride = num_threads() / lanes;
  for (int64_t group = first_thread() / lanes; group < groups; group += stride) {
    const Sum factor = static_cast<const Sum*>(task.factors)[group];
    const int64_t row = dc_chosen ? chosen_row(task, group) : -1;
#pragma unroll 2
    for (int64_t i = lane_index() % lanes; i < task.rank / kSize; i += lanes) {
      Sum sums[kSize] = {};
      add_scaled(load<Scalar, kSize>(c + group * task.rank, i), factor, sums);
      if (row >= 0) add_scaled(load<Scalar, kSize>(dc_chosen + row * task.rank, i), Sum{1}, sums);
      store(round_to<Scalar>(sums), dc + group * task.rank, i);
    }
  }
}

}  // namespace

void run_on_cuda(const NormGradient& task, cudaStream_t stream) {
  const int64_t groups = task.tokens * task.num_experts;
  if (groups == 0 || task.rank == 0) return;
  with_vectors(task.type, {task.c, task.dc_chosen, task.dc}, {task.rank},
               [&](auto scalar, auto size) {
                 const int lanes = lanes_for(task.rank / size());
                 launch_kernel(norm_gradient<decltype(scalar), size()>,
                               blocks_for(groups, kThreads / lanes), stream, task, lanes);
               });
}

}  // namespace moe_parallel
