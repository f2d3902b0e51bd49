// The input of an epilogue: a strip of 16 rows of an accumulator, [groups of 8 columns][4]. In
// group j, lane 4 r + q holds rows r, r, r + 8, r + 8, and columns 8 j + 2 q and 8 j + 2 q + 1, and
// the same two columns again. This is how mma.m16n8 and wgmma.m64nN leave their sums.
//
// An epilogue is a functor. Its kSideBySide is true if the columns of `second` follow those of
// `first`. The epilogue is then called for one accumulator after the other, and otherwise for both
// at once. All lanes of a warp must call it together. It processes 32 columns at a time: the four
// lanes of a row exchange their pairs, and each lane reads or writes 16 bytes.
#pragma once

#include "../launch.cuh"
#include "../scalar.cuh"
#include "../vector.cuh"
#include "ptx.cuh"

namespace moe_parallel::fused {

constexpr int kChunk = 32;  // columns, four groups

struct Strip {
  int64_t row;                          // of this lane, among all rows; the other one is row + 8
  int64_t end_row;                      // rows from here on do not exist
  int64_t first_column, second_column;  // of the first group of `first`, and of `second`
  int64_t columns;                      // columns from here on do not exist
};

// The pairs of one row in four groups.
using Pairs = uint32_t[4];

// This lane's place among the four lanes of a row.
__device__ inline int quad_lane() { return lane_index() % 4; }

// x[i] of lane q becomes x[q] of lane i.
__device__ inline void transpose_quad(Pairs& x) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = quad_lane() & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t other = __shfl_xor_sync(kAllLanes, upper ? x[i] : x[i + bit], bit);
      (upper ? x[i] : x[i + bit]) = other;
    }
  }
}

// The pairs of the 16 bytes that each lane of a row has read.
__device__ inline void pairs_of(const uint4& x, Pairs& pairs) {
  pairs[0] = x.x, pairs[1] = x.y, pairs[2] = x.z, pairs[3] = x.w;
  transpose_quad(pairs);
}

template <class Sum>
__device__ inline Sum sum_over_quad(Sum x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

template <class Scalar>
__device__ inline uint32_t pack(float x, float y) {
  return ptx::round_pair(x, y, Scalar{});
}

template <class Scalar>
__device__ inline float2 unpack(uint32_t x) {
  if constexpr (std::is_same_v<Scalar, __nv_bfloat16>) {
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
  }
  const auto pair = *reinterpret_cast<const Vector<Scalar, 2>*>(&x);
  return {to_sum(pair.elements[0]), to_sum(pair.elements[1])};
}

// Four groups of columns in row r (half 0) or r + 8 (half 1) of one accumulator.
struct Chunk {
  int64_t row, column;
  bool is_there;  // whether the row exists
  int group, half;
};

// Calls body(chunk) for all chunks of a strip.
template <int kGroups, class Body>
__device__ inline void for_each_chunk(const Strip& strip, int64_t first_column, const Body& body) {
  static_assert(kGroups % 4 == 0);
#pragma unroll
  for (int group = 0; group < kGroups; group += 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = strip.row + 8 * half;
      body(Chunk{row, first_column + 8 * group, row < strip.end_row, group, half});
    }
  }
}

// A matrix in memory that a strip is read from or written to.
template <class Scalar>
class Rows {
 public:
  __device__ Rows(const void* data, int64_t stride, int64_t columns)
      : data_(static_cast<Scalar*>(const_cast<void*>(data))), stride_(stride), columns_(columns) {}

  __device__ bool is_wanted() const { return data_ != nullptr; }

  __device__ void write(const Chunk& chunk, const Pairs& pairs) const {
    Pairs x = {pairs[0], pairs[1], pairs[2], pairs[3]};
    transpose_quad(x);
    if (has(chunk)) ptx::store_vector(at(chunk), x);
  }

  // Reads zeros beyond the matrix.
  __device__ void read(const Chunk& chunk, Pairs& pairs) const { pairs_of(fetch(chunk), pairs); }

  // The same without the exchange, which pairs_of() makes later.
  __device__ uint4 fetch(const Chunk& chunk) const {
    return has(chunk) ? *at(chunk) : make_uint4(0, 0, 0, 0);
  }

 private:
  __device__ int64_t column(const Chunk& chunk) const { return chunk.column + 8 * quad_lane(); }
  __device__ bool has(const Chunk& chunk) const {
    return chunk.is_there && column(chunk) < columns_;
  }
  __device__ uint4* at(const Chunk& chunk) const {
    return reinterpret_cast<uint4*>(data_ + chunk.row * stride_ + column(chunk));
  }

  Scalar* data_;
  int64_t stride_, columns_;
};

// kGroups: a multiple of 4.
template <class Epilogue, int kGroups>
__device__ inline void apply(const Epilogue& epilogue, const Strip& strip,
                             const float (&first)[kGroups][4], const float (&second)[kGroups][4]) {
  if constexpr (Epilogue::kSideBySide) {
    epilogue(strip, strip.first_column, first);
    epilogue(strip, strip.second_column, second);
  } else {
    epilogue(strip, first, second);
  }
}

}  // namespace moe_parallel::fused
