#include "../unpermute.h"
#include "scalar.cuh"

namespace moe_parallel {
namespace {

// One block a token; each thread sums whole columns, so the order of the sum is fixed.
template <class Scalar>
__global__ void sum_rows(Unpermute task) {
  using Sum = sum_t<Scalar>;
  const auto* y = static_cast<const Scalar*>(task.y);
  const auto* gates = static_cast<const Sum*>(task.gates);
  auto* out = static_cast<Scalar*>(task.out);
  for (int64_t token = blockIdx.x; token < task.tokens; token += gridDim.x) {
    const int64_t first_choice = token * task.choices;
    for (int64_t column = threadIdx.x; column < task.width; column += blockDim.x) {
      Sum sum = 0;
      for (int64_t k = 0; k < task.choices; ++k) {
        const int64_t row = task.rows[first_choice + k];
        if (row < 0) continue;
        const Sum gate = gates ? gates[first_choice + k] : Sum{1};
        sum += gate * to_sum(y[row * task.width + column]);
      }
      out[token * task.width + column] = from_sum<Scalar>(sum);
    }
  }
}

// One warp a choice: it writes the row's gradient and reduces the gate's.
template <class Scalar>
__global__ void spread_gradient(UnpermuteBackward task) {
  using Sum = sum_t<Scalar>;
  const auto* dout = static_cast<const Scalar*>(task.dout);
  const auto* y = static_cast<const Scalar*>(task.y);
  const auto* gates = static_cast<const Sum*>(task.gates);
  auto* dy = static_cast<Scalar*>(task.dy);
  auto* dgates = static_cast<Sum*>(task.dgates);
  const int lane = threadIdx.x % kWarp;
  const int64_t warps_per_block = blockDim.x / kWarp;
  const int64_t num_choices = task.tokens * task.choices;
  for (int64_t choice = blockIdx.x * warps_per_block + threadIdx.x / kWarp; choice < num_choices;
       choice += gridDim.x * warps_per_block) {
    const int64_t row = task.rows[choice];
    Sum dgate = 0;
    if (row >= 0) {
      const Sum gate = gates[choice];
      const Scalar* dout_row = dout + choice / task.choices * task.width;
      for (int64_t column = lane; column < task.width; column += kWarp) {
        const Sum gradient = to_sum(dout_row[column]);
        dgate += gradient * to_sum(y[row * task.width + column]);
        dy[row * task.width + column] = from_sum<Scalar>(gate * gradient);
      }
    }
    dgate = warp_sum(dgate);
    if (lane == 0) dgates[choice] = dgate;
  }
}

template <class Scalar>
__global__ void clear_padding(UnpermuteBackward task) {
  auto* dy = static_cast<Scalar*>(task.dy);
  for (int64_t row = blockIdx.x; row < task.num_rows; row += gridDim.x) {
    if (task.slots[row] >= 0) continue;
    for (int64_t column = threadIdx.x; column < task.width; column += blockDim.x) {
      dy[row * task.width + column] = from_sum<Scalar>(sum_t<Scalar>{0});
    }
  }
}

}  // namespace

void run_on_cuda(const Unpermute& task, cudaStream_t stream) {
  if (task.tokens == 0) return;
  with_cuda_scalar(task.type, [&](auto scalar) {
    sum_rows<decltype(scalar)><<<blocks_for(task.tokens, 1), kThreads, 0, stream>>>(task);
  });
}

void run_on_cuda(const UnpermuteBackward& task, cudaStream_t stream) {
  const int64_t num_choices = task.tokens * task.choices;
  with_cuda_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    if (num_choices > 0) {
      const int blocks = blocks_for(num_choices, kThreads / kWarp);
      spread_gradient<Scalar><<<blocks, kThreads, 0, stream>>>(task);
    }
    if (task.num_rows > 0) {
      clear_padding<Scalar><<<blocks_for(task.num_rows, 1), kThreads, 0, stream>>>(task);
    }
  });
}

}  // namespace moe_parallel
