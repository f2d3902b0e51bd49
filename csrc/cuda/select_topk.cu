#include "../norm_topk.h"
#include "launch.cuh"

namespace moe_parallel {
namespace {

template <class Norm>
struct Candidate {
  Norm score;
  int64_t expert;  // -1: none
};

template <class Norm>
__device__ inline bool leads(const Candidate<Norm>& p, const Candidate<Norm>& q) {
  if (p.expert < 0 || q.expert < 0) return p.expert >= 0;
  return ranks_before(p.score, p.expert, q.score, q.expert);
}

template <class Norm>
__device__ inline Candidate<Norm> score_of(const SelectTopK& task, int64_t token, int64_t expert) {
  if (expert >= task.num_experts) return {Norm{0}, -1};
  const auto* norms = static_cast<const Norm*>(task.norms) + token * task.num_experts;
  const auto* bias = static_cast<const Norm*>(task.bias);
  return {bias ? norms[expert] + bias[expert] : norms[expert], expert};
}

// The first in order among the candidates of all lanes; every lane holds it.
template <class Norm>
__device__ inline Candidate<Norm> first_of_lanes(Candidate<Norm> best) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const Candidate<Norm> other{__shfl_xor_sync(kAllLanes, best.score, offset),
                                __shfl_xor_sync(kAllLanes, best.expert, offset)};
    if (leads(other, best)) best = other;
  }
  return best;
}

// One thread a token, for few experts: their scores stay in registers, the chosen in a mask.
template <class Norm, int kExperts>
__global__ void select_by_thread(SelectTopK task) {
  for (int64_t token = first_thread(); token < task.tokens; token += num_threads()) {
    Candidate<Norm> candidates[kExperts];
#pragma unroll
    for (int e = 0; e < kExperts; ++e) candidates[e] = score_of<Norm>(task, token, e);
    for (int64_t j = 0; j < task.k; ++j) {
      Candidate<Norm> best{Norm{0}, -1};
#pragma unroll
      for (int e = 0; e < kExperts; ++e) {
        if (leads(candidates[e], best)) best = candidates[e];
      }
      task.experts[token * task.k + j] = best.expert;
#pragma unroll
      for (int e = 0; e < kExperts; ++e) {
        if (e == best.expert) candidates[e].expert = -1;
      }
    }
  }
}

// One warp a token; each lane looks after every 32nd expert and keeps their scores in registers.
template <class Norm, int kPerLane>
__global__ void select_by_warp(SelectTopK task) {
  for (int64_t token = first_warp(); token < task.tokens; token += num_warps()) {
    Candidate<Norm> candidates[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      candidates[i] = score_of<Norm>(task, token, lane_index() + i * kWarp);
    }
    for (int64_t j = 0; j < task.k; ++j) {
      Candidate<Norm> best{Norm{0}, -1};
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (leads(candidates[i], best)) best = candidates[i];
      }
      best = first_of_lanes(best);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (candidates[i].expert == best.expert) candidates[i].expert = -1;
      }
      if (lane_index() == 0) task.experts[token * task.k + j] = best.expert;
    }
  }
}

// The same for any number of experts: each choice reads the scores again, and takes the first
// among those behind the choice before.
template <class Norm>
__global__ void select_by_rereading(SelectTopK task) {
  for (int64_t token = first_warp(); token < task.tokens; token += num_warps()) {
    Candidate<Norm> last{Norm{0}, -1};
    for (int64_t j = 0; j < task.k; ++j) {
      Candidate<Norm> best{Norm{0}, -1};
      for (int64_t e = lane_index(); e < task.num_experts; e += kWarp) {
        const auto candidate = score_of<Norm>(task, token, e);
        const bool is_left = j == 0 || leads(last, candidate);
        if (is_left && leads(candidate, best)) best = candidate;
      }
      last = first_of_lanes(best);
      if (lane_index() == 0) task.experts[token * task.k + j] = last.expert;
    }
  }
}

template <class Norm>
void select(const SelectTopK& task, cudaStream_t stream) {
  const int by_thread = blocks_for(task.tokens, kThreads);
  const int by_warp = blocks_for(task.tokens, kWarpsPerBlock);
  if (task.num_experts <= 8) {
    launch_kernel(select_by_thread<Norm, 8>, by_thread, stream, task);
  } else if (task.num_experts <= kWarp) {
    launch_kernel(select_by_warp<Norm, 1>, by_warp, stream, task);
  } else if (task.num_experts <= 4 * kWarp) {
    launch_kernel(select_by_warp<Norm, 4>, by_warp, stream, task);
  } else {
    launch_kernel(select_by_rereading<Norm>, by_warp, stream, task);
  }
}

}  // namespace

void run_on_cuda(const SelectTopK& task, cudaStream_t stream) {
  if (task.tokens == 0) return;
  if (task.type == ScalarType::kFloat64) {
    select<double>(task, stream);
  } else {
    select<float>(task, stream);
  }
}

}  // namespace moe_parallel
