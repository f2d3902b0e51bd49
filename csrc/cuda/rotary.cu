#include "../rotary.h"
#include "launch.cuh"
#include "vector.cuh"

namespace moe_parallel {
namespace {

__device__ inline void sine_and_cosine(float angle, float* sin, float* cos) {
  sincosf(angle, sin, cos);
}
__device__ inline void sine_and_cosine(double angle, double* sin, double* cos) {
  sincos(angle, sin, cos);
}

// One thread per vector of pairs.
template <class Scalar, int kSize>
__global__ void rotate(Rotary task) {
  using Sum = sum_t<Scalar>;
  const int64_t vectors = task.half / kSize;
  const int64_t items = task.length * task.batch * task.heads * vectors;
  for (int64_t item = first_thread(); item < items; item += num_threads()) {
    const int64_t i = item % vectors, row = item / vectors;
    const int64_t head = row % task.heads, token = row / task.heads;
    const int64_t place = token / task.batch, sequence = token % task.batch;
    const auto* x = static_cast<const Scalar*>(task.x) + place * task.place_stride +
                    sequence * task.sequence_stride + head * task.head_stride;
    const auto* angles = static_cast<const Sum*>(task.angles) + place * task.angles_place_stride +
                         sequence * task.angles_sequence_stride + i * kSize;
    auto* y = static_cast<Scalar*>(task.y) + row * 2 * task.half;
    const auto first = load<Scalar, kSize>(x, i);
    const auto second = load<Scalar, kSize>(x + task.half, i);
    Sum firsts[kSize], seconds[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      Sum sin, cos;
      sine_and_cosine(task.inverse ? -angles[j] : angles[j], &sin, &cos);
      const Sum a = to_sum(first.elements[j]), b = to_sum(second.elements[j]);
      firsts[j] = a * cos - b * sin;
      seconds[j] = b * cos + a * sin;
    }
    store(round_to<Scalar>(firsts), y, i);
    store(round_to<Scalar>(seconds), y + task.half, i);
  }
}

}  // namespace

void run_on_cuda(const Rotary& task, cudaStream_t stream) {
  const int64_t pairs = task.length * task.batch * task.heads * task.half;
  if (pairs == 0) return;
  with_vectors(task.type, {task.x, task.y},
               {task.half, task.place_stride, task.sequence_stride, task.head_stride},
               [&](auto scalar, auto size) {
                 launch_kernel(rotate<decltype(scalar), size()>,
                               blocks_for(pairs / size(), kThreads), stream, task);
               });
}

}  // namespace moe_parallel
