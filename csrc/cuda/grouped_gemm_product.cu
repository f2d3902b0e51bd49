// Grouped products of any type and layout, in tiles of 64 by 64 through shared memory. Only the
// device knows the number of tiles, so blocks are launched for the largest possible number.
#include "../grouped_gemm_product.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

namespace moe_parallel {
namespace {

constexpr int kTile = 64;      // rows and columns of d
constexpr int kDepth = 16;     // of a and b at a time
constexpr int kPerThread = 4;  // rows, and columns, of d
constexpr int kThreadsAcross = kTile / kPerThread;
static_assert(kThreadsAcross * kThreadsAcross == kThreads);

// One warp computes the prefix sums of the counts, 32 groups at a time.
__global__ void sum_counts(GroupOffsets task) {
  if (warp_in_block() > 0) return;
  int64_t before = 0;
  for (int64_t first = 0; first < task.groups; first += kWarp) {
    const int64_t e = first + lane_index();
    const int64_t count = e < task.groups ? task.counts[e] : 0;
    const int64_t here = sum_up_to_lane(min(max(count, int64_t{0}), task.rows));
    const int64_t sum = min(before + here, task.rows);
    if (e < task.groups) task.offsets[e + 1] = sum;
    before = __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
  if (lane_index() == 0) task.offsets[0] = 0;
}

__host__ __device__ inline int64_t tiles_of(int64_t size) { return (size + kTile - 1) / kTile; }

// A tile of d: its group, the number of rows of the group, and where the tile begins in the group's
// matrix.
struct Tile {
  int64_t group, rows, first_row, first_column;
};

__device__ inline Tile find_tile(const GroupedProduct& task, int64_t index) {
  const int64_t across = tiles_of(task.n);
  int64_t down = index / across;
  for (int64_t e = 0; e < task.groups; ++e) {
    const int64_t rows = task.offsets[e + 1] - task.offsets[e];
    const int64_t tiles = tiles_of(task.m == kRagged ? rows : task.m);
    if (down < tiles) return {e, rows, down * kTile, index % across * kTile};
    down -= tiles;
  }
  return {-1, 0, 0, 0};
}

template <class Scalar>
struct Matrix {
  Scalar* data;
  int64_t by_row, by_column;  // elements between two rows, and between two columns

  __device__ Matrix(const GroupedProduct& task, const GroupedMatrix& matrix, int64_t group)
      : by_row(matrix.by_columns ? 1 : matrix.stride),
        by_column(matrix.by_columns ? matrix.stride : 1) {
    const int64_t first =
        matrix.is_cut ? task.offsets[group] * matrix.stride : group * matrix.group_stride;
    data = static_cast<Scalar*>(const_cast<void*>(matrix.data)) + first;
  }

  __device__ Scalar& at(int64_t row, int64_t column) const {
    return data[row * by_row + column * by_column];
  }
};

template <class Sum>
struct Operands {
  Sum a[kDepth][kTile + 1];  // transposed; the extra element avoids bank conflicts
  Sum b[kDepth][kTile + 1];
};

// Consecutive threads read consecutive elements of memory. Elements beyond the ends are zero.
template <class Scalar, class Sum>
__device__ inline void load_operands(const Matrix<Scalar>& a, const Matrix<Scalar>& b,
                                     const Tile& tile, int64_t first_k, int64_t m, int64_t n,
                                     int64_t k, Operands<Sum>& to) {
  for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {
    const int row = a.by_row == 1 ? i % kTile : i / kDepth;
    const int depth = a.by_row == 1 ? i / kTile : i % kDepth;
    const bool is_inside = tile.first_row + row < m && first_k + depth < k;
    to.a[depth][row] = is_inside ? to_sum(a.at(tile.first_row + row, first_k + depth)) : Sum{0};
  }
  for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {
    const int column = b.by_column == 1 ? i % kTile : i / kDepth;
    const int depth = b.by_column == 1 ? i / kTile : i % kDepth;
    const bool is_inside = tile.first_column + column < n && first_k + depth < k;
    to.b[depth][column] =
        is_inside ? to_sum(b.at(first_k + depth, tile.first_column + column)) : Sum{0};
  }
}

template <class Scalar, class Out>
__global__ void multiply_tiles(GroupedProduct task, int64_t most_tiles) {
  using Sum = sum_t<Scalar>;
  __shared__ Operands<Sum> operands;
  const int row = static_cast<int>(threadIdx.x) / kThreadsAcross * kPerThread;
  const int column = static_cast<int>(threadIdx.x) % kThreadsAcross;
  for (int64_t index = blockIdx.x; index < most_tiles; index += gridDim.x) {
    const Tile tile = find_tile(task, index);
    if (tile.group < 0) return;
    const int64_t m = task.m == kRagged ? tile.rows : task.m;
    const int64_t k = task.k == kRagged ? tile.rows : task.k;
    const Matrix<Scalar> a(task, task.a, tile.group), b(task, task.b, tile.group);
    const Matrix<Out> d(task, task.d, tile.group);
    Sum sums[kPerThread][kPerThread] = {};
    for (int64_t first_k = 0; first_k < k; first_k += kDepth) {
      load_operands(a, b, tile, first_k, m, task.n, k, operands);
      __syncthreads();
#pragma unroll
      for (int depth = 0; depth < kDepth; ++depth) {
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
          for (int j = 0; j < kPerThread; ++j) {
            sums[i][j] +=
                operands.a[depth][row + i] * operands.b[depth][column + j * kThreadsAcross];
          }
        }
      }
      __syncthreads();
    }
    for (int i = 0; i < kPerThread; ++i) {
      for (int j = 0; j < kPerThread; ++j) {
        const int64_t to_row = tile.first_row + row + i;
        const int64_t to_column = tile.first_column + column + j * kThreadsAcross;
        if (to_row >= m || to_column >= task.n) continue;
        Out& to = d.at(to_row, to_column);
        to = from_sum<Out>(task.accumulate ? to_sum(to) + sums[i][j] : sums[i][j]);
      }
    }
  }
}

}  // namespace

void run_on_cuda(const GroupOffsets& task, cudaStream_t stream) {
  launch_kernel(sum_counts, 1, stream, task);
}

void run_on_cuda(const GroupedProduct& task, cudaStream_t stream) {
  const int64_t down =
      task.m == kRagged ? task.rows / kTile + task.groups : task.groups * tiles_of(task.m);
  const int64_t tiles = down * tiles_of(task.n);
  if (tiles == 0) return;
  with_cuda_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const int blocks = blocks_for(tiles, 1);
    if (task.out_type == task.type) {
      launch_kernel(multiply_tiles<Scalar, Scalar>, blocks, stream, task, tiles);
    } else if constexpr (!std::is_same_v<Scalar, double>) {
      launch_kernel(multiply_tiles<Scalar, float>, blocks, stream, task, tiles);
    }
  });
}

}  // namespace moe_parallel
