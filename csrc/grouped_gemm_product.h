// Products of groups of rows on CUDA, where the device alone knows how many rows a group has.
#pragma once

#include <cstdint>

#include "scalar_type.h"

#ifdef MOE_PARALLEL_CUDA
#include <cuda_runtime_api.h>
#endif

namespace moe_parallel {

// offsets[e] = the rows of the groups before e; offsets[groups] = all. A negative count is taken
// for 0, and what lies beyond `rows` is cut off.
struct GroupOffsets {
  const int64_t* counts;  // [groups]
  int64_t* offsets;       // [groups + 1]
  int64_t groups;
  int64_t rows;
};

// A matrix a group: its own one, `group_stride` elements after the one before, or (cut) the rows
// of the group in one tensor, or their transpose.
struct GroupedMatrix {
  const void* data;
  int64_t stride;        // elements between two rows, or two columns if by_columns
  int64_t group_stride;  // of matrices that are not cut
  bool by_columns;       // whose columns lie dense, not its rows
  bool is_cut;
};

constexpr int64_t kRagged = -1;

// d[e] (+)= a[e] b[e] with a[e] [m, k] and b[e] [k, n]. kRagged, the rows of the group, is either m
// (a and d are cut) or, in a gradient of weights, k (a and b are cut).
struct GroupedProduct {
  ScalarType type;      // of a and b
  ScalarType out_type;  // of d: that of a and b, or float
  GroupedMatrix a, b;
  GroupedMatrix d;         // by rows; written
  const int64_t* offsets;  // [groups + 1]
  int64_t groups;
  int64_t rows;  // of all groups
  int64_t m, n, k;
  bool accumulate;
};

#ifdef MOE_PARALLEL_CUDA
void run_on_cuda(const GroupOffsets& task, cudaStream_t stream);
// For any type, stride, alignment and size, without tensor cores.
void run_on_cuda(const GroupedProduct& task, cudaStream_t stream);
#endif

}  // namespace moe_parallel
