// The arguments that CUTLASS's grouped kernels read from device memory: a problem, pointers and
// strides per group. They are computed on the device from the offsets.
#pragma once

#include <type_traits>

#include "../../grouped_gemm_product.h"
#include "../launch.cuh"

namespace moe_parallel {

// `Problem` is constructed from m, n and k. A group without rows is a problem without tiles.
template <class Problem>
struct GroupArguments {
  Problem* problems;
  void **a, **b, **d;
  int64_t *a_stride, *b_stride, *d_stride;

  static constexpr int64_t kProblemBytes = 16;
  static_assert(sizeof(Problem) <= kProblemBytes);

  static int64_t bytes(int64_t groups) { return groups * (kProblemBytes + 6 * 8); }

  GroupArguments(void* memory, int64_t groups) {
    auto* next = static_cast<char*>(memory);
    problems = reinterpret_cast<Problem*>(next);
    next += groups * kProblemBytes;
    for (void*** pointers : {&a, &b, &d}) {
      *pointers = reinterpret_cast<void**>(next);
      next += groups * 8;
    }
    for (int64_t** strides : {&a_stride, &b_stride, &d_stride}) {
      *strides = reinterpret_cast<int64_t*>(next);
      next += groups * 8;
    }
  }
};

__host__ __device__ inline int64_t size_of(ScalarType type) {
  return type == ScalarType::kFloat64 ? 8 : type == ScalarType::kFloat32 ? 4 : 2;
}

__device__ inline void* begin_of(const GroupedMatrix& matrix, ScalarType type, int64_t group,
                                 int64_t first_row) {
  const int64_t elements = matrix.is_cut ? first_row * matrix.stride : group * matrix.group_stride;
  return static_cast<char*>(const_cast<void*>(matrix.data)) + elements * size_of(type);
}

template <class Problem>
__global__ void make_arguments(GroupedProduct task, GroupArguments<Problem> to) {
  for (int64_t e = first_thread(); e < task.groups; e += num_threads()) {
    const int64_t first = task.offsets[e];
    const int rows = static_cast<int>(task.offsets[e + 1] - first);
    const auto size = [&](int64_t wanted) {
      return rows == 0 ? 0 : wanted == kRagged ? rows : static_cast<int>(wanted);
    };
    to.problems[e] = Problem(size(task.m), size(task.n), size(task.k));
    to.a[e] = begin_of(task.a, task.type, e, first);
    to.b[e] = begin_of(task.b, task.type, e, first);
    to.d[e] = begin_of(task.d, task.out_type, e, first);
    to.a_stride[e] = task.a.stride;
    to.b_stride[e] = task.b.stride;
    to.d_stride[e] = task.d.stride;
  }
}

// CUTLASS does not write the product of a group without rows, so this kernel sets it to 0. One warp
// per row.
static __global__ void clear_empty_groups(GroupedProduct task) {
  for (int64_t i = first_warp(); i < task.groups * task.m; i += num_warps()) {
    const int64_t e = i / task.m;
    if (task.offsets[e + 1] > task.offsets[e]) continue;
    auto* row = static_cast<char*>(begin_of(task.d, task.out_type, e, 0)) +
                i % task.m * task.d.stride * size_of(task.out_type);
    const int64_t words = task.n * size_of(task.out_type) / 2;
    for (int64_t j = lane_index(); j < words; j += kWarp) reinterpret_cast<uint16_t*>(row)[j] = 0;
  }
}

template <class Problem>
GroupArguments<Problem> launch_arguments(const GroupedProduct& task, void* memory,
                                         cudaStream_t stream) {
  const GroupArguments<Problem> arguments(memory, task.groups);
  launch_kernel(make_arguments<Problem>, blocks_for(task.groups, kThreads), stream, task,
                arguments);
  if (task.k == kRagged && !task.accumulate) {
    launch_kernel(clear_empty_groups, blocks_for(task.groups * task.m, kWarpsPerBlock), stream,
                  task);
  }
  return arguments;
}

}  // namespace moe_parallel
