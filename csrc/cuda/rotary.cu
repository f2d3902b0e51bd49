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
__global__ void rotate(Rotary task, int64_t heads_of_token) {
  using Sum = sum_t<Scalar>;
  const int64_t vectors = task.half / kSize;
  const int64_t items = task.length * task.batch * heads_of_token * vectors;
  for (int64_t item = first_thread(); item < items; item += num_threads()) {
    const int64_t i = item % vectors, row = item / vectors;
    const int64_t token = row / heads_of_token;
    const int64_t place = token / task.batch, sequence = token % task.batch;
    int64_t number = row % heads_of_token;
    int kind = 0;
    while (number >= task.heads[kind].groups * task.heads[kind].per_group) {
      number -= task.heads[kind].groups * task.heads[kind].per_group;
      ++kind;
    }
    const Heads& heads = task.heads[kind];
    const int64_t group = number / heads.per_group, head = number % heads.per_group;
    const auto* x = static_cast<const Scalar*>(heads.x) + place * heads.of_x.place +
                    sequence * heads.of_x.sequence + group * heads.of_x.group +
                    head * heads.of_x.head;
    auto* y = static_cast<Scalar*>(heads.y) + place * heads.of_y.place +
              sequence * heads.of_y.sequence + group * heads.of_y.group + head * heads.of_y.head;
    const auto first = load<Scalar, kSize>(x, i);
    const auto second = load<Scalar, kSize>(x + task.half, i);
    if (!heads.are_rotated) {
      store(first, y, i);
      store(second, y + task.half, i);
      continue;
    }
    const auto* angles = static_cast<const Sum*>(task.angles) + place * task.angles_place_stride +
                         sequence * task.angles_sequence_stride + i * kSize;
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
  const int64_t heads = task.heads_of_token();
  const int64_t pairs = task.length * task.batch * heads * task.half;
  if (pairs == 0) return;
  const Heads &q = task.heads[0], &k = task.heads[1], &v = task.heads[2];
  with_vectors(task.type, {q.x, q.y, k.x, k.y, v.x, v.y},
               {task.half, q.of_x.joint(), q.of_y.joint(), k.of_x.joint(), k.of_y.joint(),
                v.of_x.joint(), v.of_y.joint()},
               [&](auto scalar, auto size) {
                 launch_kernel(rotate<decltype(scalar), size()>,
                               blocks_for(pairs / size(), kThreads), stream, task, heads);
               });
}

}  // namespace moe_parallel
