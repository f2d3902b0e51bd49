#include "../expert_merge.h"
#include "reduce.cuh"
#include "vector.cuh"

namespace moe_parallel {
namespace {

constexpr int kSumsInFlight = 4;  // merges that are computed from one read of the experts

// to[i] = sum over j of weights[i * by_i + j * by_j] * from[j]. One thread per vector of columns.
template <class Scalar>
struct Combination {
  const Scalar* from;  // [inner, size]
  const sum_t<Scalar>* weights;
  Scalar* to;  // [outer, size]
  int64_t outer, inner, size;
  int64_t by_i, by_j;
};

template <class Scalar, int kSize>
__global__ void combine(Combination<Scalar> task) {
  using Sum = sum_t<Scalar>;
  for (int64_t column = first_thread(); column < task.size / kSize; column += num_threads()) {
    for (int64_t first = 0; first < task.outer; first += kSumsInFlight) {
      Sum sums[kSumsInFlight][kSize] = {};
#pragma unroll 2
      for (int64_t j = 0; j < task.inner; ++j) {
        const auto x = load<Scalar, kSize>(task.from + j * task.size, column);
#pragma unroll
        for (int i = 0; i < kSumsInFlight; ++i) {
          if (first + i >= task.outer) continue;
          add_scaled(x, task.weights[(first + i) * task.by_i + j * task.by_j], sums[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kSumsInFlight; ++i) {
        if (first + i >= task.outer) continue;
        store(round_to<Scalar>(sums[i]), task.to + (first + i) * task.size, column);
      }
    }
  }
}

// One block per pair. There are merges times experts pairs, which is enough blocks, so that no sum
// is split.
template <class Scalar, int kSize>
__global__ void differentiate_weights(ExpertMergeBackward task) {
  using Sum = sum_t<Scalar>;
  const int64_t pairs = task.merges * task.num_experts;
  for (int64_t pair = blockIdx.x; pair < pairs; pair += gridDim.x) {
    const int64_t p = pair / task.num_experts, e = pair % task.num_experts;
    const auto* dmerged = static_cast<const Scalar*>(task.dmerged) + p * task.size;
    const auto* w = static_cast<const Scalar*>(task.w) + e * task.size;
    Sum sum = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < task.size / kSize; i += kThreads) {
      sum += dot(load<Scalar, kSize>(dmerged, i), load<Scalar, kSize>(w, i));
    }
    sum = sum_over_block(sum);
    if (threadIdx.x == 0) static_cast<Sum*>(task.dweights)[pair] = sum;
  }
}

}  // namespace

void run_on_cuda(const ExpertMerge& task, cudaStream_t stream) {
  if (task.merges == 0 || task.size == 0) return;
  with_vectors(task.type, {task.w, task.merged}, {task.size}, [&](auto scalar, auto size) {
    using Scalar = decltype(scalar);
    launch_kernel(combine<Scalar, size()>, blocks_for(task.size / size(), kThreads), stream,
                  Combination<Scalar>{.from = static_cast<const Scalar*>(task.w),
                                      .weights = static_cast<const sum_t<Scalar>*>(task.weights),
                                      .to = static_cast<Scalar*>(task.merged),
                                      .outer = task.merges,
                                      .inner = task.num_experts,
                                      .size = task.size,
                                      .by_i = task.num_experts,
                                      .by_j = 1});
  });
}

void run_on_cuda(const ExpertMergeBackward& task, cudaStream_t stream) {
  if (task.num_experts == 0) return;
  with_vectors(
      task.type, {task.dmerged, task.w, task.dw}, {task.size}, [&](auto scalar, auto size) {
        using Scalar = decltype(scalar);
        if (task.size > 0) {
          launch_kernel(
              combine<Scalar, size()>, blocks_for(task.size / size(), kThreads), stream,
              Combination<Scalar>{.from = static_cast<const Scalar*>(task.dmerged),
                                  .weights = static_cast<const sum_t<Scalar>*>(task.weights),
                                  .to = static_cast<Scalar*>(task.dw),
                                  .outer = task.num_experts,
                                  .inner = task.merges,
                                  .size = task.size,
                                  .by_i = 1,
                                  .by_j = task.num_experts});
        }
        if (task.merges > 0) {
          launch_kernel(differentiate_weights<Scalar, size()>,
                        blocks_for(task.merges * task.num_experts, 1), stream, task);
        }
      });
}

}  // namespace moe_parallel
