// Grouped products on CUDA. Only the device knows how many rows a group has.
#pragma once

#include <cstdint>

#include "scalar_type.h"

#ifdef MOE_PARALLEL_CUDA
#include <cuda_runtime_api.h>
#endif

namespace moe_parallel {

// offsets[e] = the number of rows of the groups before e; offsets[groups] = the number of all rows.
// A negative count is read as 0, and no offset exceeds `rows`.
struct GroupOffsets {
  const int64_t* counts;  // [groups]
  int64_t* offsets;       // [groups + 1]
  int64_t groups;
  int64_t rows;
};

// One matrix per group. Either each group has a matrix of its own, `group_stride` elements after
// the previous one, or (is_cut) its matrix is the group's rows of one tensor, or their transpose.
struct GroupedMatrix {
  const void* data;
  int64_t stride;        // elements between two rows, or two columns if by_columns
  int64_t group_stride;  // of matrices that are not cut
  bool by_columns;       // column-major: the columns are dense, not the rows
  bool is_cut;
};

constexpr int64_t kRagged = -1;

// d[e] (+)= a[e] b[e], where a[e] is [m, k] and b[e] is [k, n]. kRagged stands for the number of
// rows of the group. It is either m (a and d are cut) or, in a weight gradient, k (a and b are
// cut).
struct GroupedProduct {
  ScalarType type;      // of a and b
  ScalarType out_type;  // of d: that of a and b, or float
  GroupedMatrix a, b;
  GroupedMatrix d;         // row-major; the result
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
