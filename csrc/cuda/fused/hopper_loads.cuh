// How the threads of the producer fill a slab (hopper_stage.cuh) from global memory.
#pragma once

#include "hopper_stage.cuh"

namespace moe_parallel::fused::hopper {

constexpr int kProducers = 128;
constexpr int kLinesApart = kProducers / kPieces;      // between two of a thread's lines
constexpr int kCopies = kLines / kLinesApart;          // per thread and slab
constexpr int kPieceElements = 8, kLineElements = 64;  // of 16 bits

__device__ inline int first_line() { return static_cast<int>(threadIdx.x / kPieces); }
__device__ inline int piece() { return static_cast<int>(threadIdx.x % kPieces); }

// The place of this thread's i-th copy in a slab. The thread's lines are all the same modulo 8, so
// they have the same swizzle.
__device__ inline ptx::SharedAddress place(int i) {
  const int swizzled = piece() ^ (first_line() % 8);
  return first_line() * kLineBytes + swizzled * kPieceBytes + i * kLinesApart * kLineBytes;
}

// Gathers the rows of a tile.
template <class Scalar>
class RowLoads {
 public:
  __device__ RowLoads(const ProductPart& part, const Tile& tile)
      : data_(part.a.data), depth_(static_cast<int>(part.depth)) {
    const auto* data = static_cast<const Scalar*>(part.a.data);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int64_t row = tile.first_row + first_line() + i * kLinesApart;
      const int64_t source = row < tile.end_row ? source_of(part.a, row) : -1;
      rows_[i] = source < 0 ? nullptr : data + source * part.a.stride + piece() * kPieceElements;
    }
  }

  __device__ void start(ptx::SharedAddress slab, int depth) const {
    const bool is_inside = depth + piece() * kPieceElements < depth_;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      ptx::copy_or_clear(slab + place(i), rows_[i] + depth, rows_[i] && is_inside, data_);
    }
  }

 private:
  const void* data_;
  const Scalar* rows_[kCopies];  // null: zeros
  int depth_;
};

// Loads 128 columns of a row-major matrix, or of several matrices side by side.
template <class Scalar, bool kByColumns>
class ColumnLoads {
 public:
  __device__ ColumnLoads(const FusedProduct& product, const ProductPart& part,
                         const GroupedMatrix& matrix, int64_t group, int64_t first_column)
      : data_(matrix.data), depth_(static_cast<int>(part.depth)), stride_(matrix.stride) {
    const auto* line = static_cast<const Scalar*>(matrix.data) + first_line() * matrix.stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t column = first_column + half * kLineElements + piece() * kPieceElements;
      const int64_t side = column / product.columns_per_matrix;
      const int64_t in_matrix = column - side * product.columns_per_matrix;
      columns_[half] = column < product.columns
                           ? line + (group + side) * matrix.group_stride + in_matrix
                           : nullptr;
    }
  }

  __device__ void start(ptx::SharedAddress slab, int depth) const {
    constexpr int kHalf = kCopies / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto* from = columns_[half] + depth * stride_;
#pragma unroll
      for (int i = 0; i < kHalf; ++i, from += kLinesApart * stride_) {
        const bool is_inside = depth + first_line() + i * kLinesApart < depth_;
        ptx::copy_or_clear(slab + place(half * kHalf + i), from, columns_[half] && is_inside,
                           data_);
      }
    }
  }

 private:
  const void* data_;
  const Scalar* columns_[2];  // in this thread's first line; null: beyond the columns
  int depth_;
  int64_t stride_;
};

// Loads 128 columns of one column-major matrix.
template <class Scalar>
class ColumnLoads<Scalar, /*kByColumns=*/true> {
 public:
  __device__ ColumnLoads(const FusedProduct& product, const ProductPart& part,
                         const GroupedMatrix& matrix, int64_t group, int64_t first_column)
      : data_(matrix.data),
        depth_(static_cast<int>(part.depth)),
        stride_(matrix.stride),
        left_(static_cast<int>(product.columns - first_column) - first_line()),
        column_(static_cast<const Scalar*>(matrix.data) + group * matrix.group_stride +
                (first_column + first_line()) * matrix.stride + piece() * kPieceElements) {}

  __device__ void start(ptx::SharedAddress slab, int depth) const {
    const bool is_inside = depth + piece() * kPieceElements < depth_;
    const auto* from = column_ + depth;
#pragma unroll
    for (int i = 0; i < kCopies; ++i, from += kLinesApart * stride_) {
      ptx::copy_or_clear(slab + place(i), from, i * kLinesApart < left_ && is_inside, data_);
    }
  }

 private:
  const void* data_;
  int depth_;
  int64_t stride_;
  int left_;  // remaining columns, from this thread's first one
  const Scalar* column_;
};

}  // namespace moe_parallel::fused::hopper
