// One block per row, because a row has as many numbers as the vocabulary.
#include "../softmax.h"
#include "reduce.cuh"
#include "vector.cuh"

namespace moe_parallel {
namespace {

// exp(x). The relative error of the fast exponential is small against the rounding of 16-bit
// logits.
template <class Scalar>
__device__ inline sum_t<Scalar> exponential(sum_t<Scalar> x) {
  if constexpr (sizeof(Scalar) == 2) {
    return __expf(x);
  } else {
    return exp(x);
  }
}

// The sum of exp(x - most) over numbers whose largest is `most`. Without numbers: -inf and 0.
template <class Sum>
struct Exponentials {
  Sum most, sum;
};

template <class Scalar>
__device__ inline sum_t<Scalar> rescale(const Exponentials<sum_t<Scalar>>& x, sum_t<Scalar> most) {
  // Where x.most is -inf, the sum is 0, or NaN if a number was; -inf - -inf would be NaN.
  return x.most == most || x.most == -HUGE_VAL ? x.sum : x.sum * exponential<Scalar>(x.most - most);
}

template <class Scalar>
__device__ inline Exponentials<sum_t<Scalar>> combine(const Exponentials<sum_t<Scalar>>& x,
                                                      const Exponentials<sum_t<Scalar>>& y) {
  const auto most = x.most > y.most ? x.most : y.most;
  return {most, rescale<Scalar>(x, most) + rescale<Scalar>(y, most)};
}

// All threads must call it. Thread 0 holds the result.
template <class Scalar>
__device__ inline Exponentials<sum_t<Scalar>> combine_over_block(Exponentials<sum_t<Scalar>> x) {
  using Sum = sum_t<Scalar>;
  __shared__ Sum most_of_warps[kWarpsPerBlock], sum_of_warps[kWarpsPerBlock];
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    x = combine<Scalar>(x, {__shfl_down_sync(kAllLanes, x.most, offset),
                            __shfl_down_sync(kAllLanes, x.sum, offset)});
  }
  __syncthreads();  // the results of an earlier row have been read
  if (lane_index() == 0) {
    most_of_warps[warp_in_block()] = x.most;
    sum_of_warps[warp_in_block()] = x.sum;
  }
  __syncthreads();
  for (int warp = 1; threadIdx.x == 0 && warp < kWarpsPerBlock; ++warp) {
    x = combine<Scalar>(x, {most_of_warps[warp], sum_of_warps[warp]});
  }
  return x;
}

template <class Scalar, int kSize>
__global__ void sum_exponentials(SoftmaxSums task) {
  using Sum = sum_t<Scalar>;
  for (int64_t row = blockIdx.x; row < task.rows; row += gridDim.x) {
    const auto* logits = static_cast<const Scalar*>(task.logits) + row * task.width;
    Exponentials<Sum> all{static_cast<Sum>(-HUGE_VAL), 0};
#pragma unroll 2
    for (int64_t i = threadIdx.x; i < task.width / kSize; i += kThreads) {
      const auto x = load<Scalar, kSize>(logits, i);
      Sum most = all.most;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const Sum each = to_sum(x.elements[j]);
        if (each > most) most = each;
      }
      all = {most, rescale<Scalar>(all, most)};
      const Sum base = most == -HUGE_VAL ? Sum{0} : most;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        all.sum += exponential<Scalar>(to_sum(x.elements[j]) - base);
      }
    }
    all = combine_over_block<Scalar>(all);
    if (threadIdx.x == 0) {
      static_cast<Sum*>(task.most)[row] = all.most;
      static_cast<Sum*>(task.sums)[row] = all.sum;
    }
  }
}

template <class Scalar, int kSize>
__global__ void write_gradient(SoftmaxGradient task) {
  using Sum = sum_t<Scalar>;
  for (int64_t row = blockIdx.x; row < task.rows; row += gridDim.x) {
    auto* logits = static_cast<Scalar*>(task.logits) + row * task.width;
    const Sum most = static_cast<const Sum*>(task.most)[row];
    const Sum share = Sum{1} / static_cast<const Sum*>(task.sums)[row];
    const int64_t label = task.labels[row];
#pragma unroll 2
    for (int64_t i = threadIdx.x; i < task.width / kSize; i += kThreads) {
      const auto x = load<Scalar, kSize>(logits, i);
      Sum gradients[kSize];
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        gradients[j] = exponential<Scalar>(to_sum(x.elements[j]) - most) * share;
        if (i * kSize + j == label) gradients[j] -= 1;
      }
      store(round_to<Scalar>(gradients), logits, i);
    }
  }
}

}  // namespace

void run_on_cuda(const SoftmaxSums& task, cudaStream_t stream) {
  if (task.rows == 0) return;
  with_vectors(task.type, {task.logits}, {task.width}, [&](auto scalar, auto size) {
    launch_kernel(sum_exponentials<decltype(scalar), size()>, blocks_for(task.rows, 1), stream,
                  task);
  });
}

void run_on_cuda(const SoftmaxGradient& task, cudaStream_t stream) {
  if (task.rows == 0) return;
  with_vectors(task.type, {task.logits}, {task.width}, [&](auto scalar, auto size) {
    launch_kernel(write_gradient<decltype(scalar), size()>, blocks_for(task.rows, 1), stream, task);
  });
}

}  // namespace moe_parallel
