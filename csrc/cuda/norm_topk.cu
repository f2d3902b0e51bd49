#include "../norm_topk.h"
#include "scalar.cuh"

namespace moe_parallel {
namespace {

// One warp a group of `rank` elements.
template <class Scalar>
__global__ void group_norms(GroupNorms task) {
  using Sum = sum_t<Scalar>;
  const auto* c = static_cast<const Scalar*>(task.c);
  auto* norms = static_cast<Sum*>(task.norms);
  const int lane = threadIdx.x % kWarp;
  const int64_t warps_per_block = blockDim.x / kWarp;
  const int64_t groups = task.tokens * task.num_experts;
  for (int64_t group = blockIdx.x * warps_per_block + threadIdx.x / kWarp; group < groups;
       group += gridDim.x * warps_per_block) {
    Sum sum = 0;
    for (int64_t i = lane; i < task.rank; i += kWarp) {
      const Sum x = to_sum(c[group * task.rank + i]);
      sum += x * x;
    }
    sum = warp_sum(sum);
    if (lane == 0) norms[group] = sqrt(sum);
  }
}

template <class Scalar>
__global__ void group_scale(GroupScale task) {
  using Sum = sum_t<Scalar>;
  auto* c = static_cast<Scalar*>(task.c);
  const auto* factors = static_cast<const Sum*>(task.factors);
  const int64_t groups = task.tokens * task.num_experts;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < groups * task.rank;
       i += stride) {
    c[i] = from_sum<Scalar>(factors[i / task.rank] * to_sum(c[i]));
  }
}

// One thread a token.
template <class Norm>
__global__ void select_experts(SelectTopK task) {
  const auto* norms = static_cast<const Norm*>(task.norms);
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t token = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; token < task.tokens;
       token += stride) {
    select_topk(norms + token * task.num_experts, task.num_experts, task.k,
                task.experts + token * task.k);
  }
}

}  // namespace

void run_on_cuda(const GroupNorms& task, cudaStream_t stream) {
  const int64_t groups = task.tokens * task.num_experts;
  if (groups == 0) return;
  with_cuda_scalar(task.type, [&](auto scalar) {
    const int blocks = blocks_for(groups, kThreads / kWarp);
    group_norms<decltype(scalar)><<<blocks, kThreads, 0, stream>>>(task);
  });
}

void run_on_cuda(const GroupScale& task, cudaStream_t stream) {
  const int64_t elements = task.tokens * task.num_experts * task.rank;
  if (elements == 0) return;
  with_cuda_scalar(task.type, [&](auto scalar) {
    group_scale<decltype(scalar)><<<blocks_for(elements, kThreads), kThreads, 0, stream>>>(task);
  });
}

void run_on_cuda(const SelectTopK& task, cudaStream_t stream) {
  if (task.tokens == 0) return;
  with_cuda_scalar(task.type, [&](auto scalar) {
    using Norm = sum_t<decltype(scalar)>;
    select_experts<Norm><<<blocks_for(task.tokens, kThreads), kThreads, 0, stream>>>(task);
  });
}

}  // namespace moe_parallel
