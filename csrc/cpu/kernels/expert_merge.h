#pragma once

#include "../../expert_merge.h"
#include "vectors.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

// `count` rows of one matrix, `stride` elements apart.
template <class Element>
struct Rows {
  Element* first;
  int64_t count;
  int64_t stride;

  Element* operator[](int64_t row) const { return first + row * stride; }
};

// weights[out, in], either way round in memory.
template <class Sum>
struct Weights {
  const Sum* first;
  int64_t out_stride;
  int64_t in_stride;

  Sum at(int64_t out, int64_t in) const { return first[out * out_stride + in * in_stride]; }
};

constexpr int kTileRows = 4;
constexpr int kTileVectors = kVectorBytes == 64 ? 4 : 2;  // 16 or 8 registers hold a tile's sums

// out[row + r] = sum over in of weights[row + r, in] * in, on kVectors vectors of columns.
template <int kRows, int kVectors, class Scalar, class Lanes>
inline void combine_tile(Rows<const Scalar> in, Weights<sum_t<Scalar>> weights, Rows<Scalar> out,
                         int64_t row, int64_t column, Lanes lanes) {
  using Sum = sum_t<Scalar>;
  Vector<Sum> sums[kRows][kVectors] = {};
  for (int64_t i = 0; i < in.count; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      const Vector<Sum> values = lanes.load(in[i] + column + v * kLanes<Sum>);
      for (int r = 0; r < kRows; ++r) sums[r][v] += weights.at(row + r, i) * values;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      lanes.store(out[row + r] + column + v * kLanes<Sum>, sums[r][v]);
    }
  }
}

// All rows of `out` on these columns: what they read of `in` stays in the L1 cache meanwhile.
template <int kVectors, class Scalar, class Lanes>
inline void combine_columns(Rows<const Scalar> in, Weights<sum_t<Scalar>> weights, Rows<Scalar> out,
                            int64_t column, Lanes lanes) {
  int64_t row = 0;
  for (; row + kTileRows <= out.count; row += kTileRows) {
    combine_tile<kTileRows, kVectors>(in, weights, out, row, column, lanes);
  }
  for (; row < out.count; ++row) combine_tile<1, kVectors>(in, weights, out, row, column, lanes);
}

template <class Scalar>
inline void combine(Rows<const Scalar> in, Weights<sum_t<Scalar>> weights, Rows<Scalar> out,
                    int64_t begin, int64_t end) {
  using Sum = sum_t<Scalar>;
  constexpr int64_t kColumns = kTileVectors * kLanes<Sum>;
  int64_t column = begin;
  for (; column + kColumns <= end; column += kColumns) {
    combine_columns<kTileVectors>(in, weights, out, column, AllLanes{});
  }
  for_columns<Sum>(end - column, [&](int64_t i, auto lanes) {
    combine_columns<1>(in, weights, out, column + i, lanes);
  });
}

// products[r, s] of a[row + r] and b[col + s] on columns begin..end, `stride` products a row.
template <int kRows, int kCols, class Scalar>
inline void multiply_tile(Rows<const Scalar> a, Rows<const Scalar> b, int64_t row, int64_t col,
                          int64_t begin, int64_t end, sum_t<Scalar>* products) {
  using Sum = sum_t<Scalar>;
  Vector<Sum> sums[kRows][kCols] = {};
  for_columns<Sum>(end - begin, [&](int64_t i, auto lanes) {
    Vector<Sum> of_a[kRows];
    for (int r = 0; r < kRows; ++r) of_a[r] = lanes.load(a[row + r] + begin + i);
    for (int c = 0; c < kCols; ++c) {
      const Vector<Sum> of_b = lanes.load(b[col + c] + begin + i);
      for (int r = 0; r < kRows; ++r) sums[r][c] += of_a[r] * of_b;
    }
  });
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) {
      products[(row + r) * b.count + col + c] = sum_of_lanes<Sum>(sums[r][c]);
    }
  }
}

// products[i, j] = a[i] . b[j] on columns begin..end
template <class Scalar>
inline void multiply(Rows<const Scalar> a, Rows<const Scalar> b, int64_t begin, int64_t end,
                     sum_t<Scalar>* products) {
  constexpr int kCols = kTileVectors;
  for (int64_t row = 0; row < a.count;) {
    const bool whole = row + kTileRows <= a.count;
    int64_t col = 0;
    for (; whole && col + kCols <= b.count; col += kCols) {
      multiply_tile<kTileRows, kCols>(a, b, row, col, begin, end, products);
    }
    for (; whole && col < b.count; ++col) {
      multiply_tile<kTileRows, 1>(a, b, row, col, begin, end, products);
    }
    for (; !whole && col < b.count; ++col) {
      multiply_tile<1, 1>(a, b, row, col, begin, end, products);
    }
    row += whole ? kTileRows : 1;
  }
}

inline void expert_merge(const ExpertMerge& task, int64_t begin, int64_t end) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    combine<Scalar>({static_cast<const Scalar*>(task.w), task.num_experts, task.size},
                    Weights<Sum>{static_cast<const Sum*>(task.weights), task.num_experts, 1},
                    {static_cast<Scalar*>(task.merged), task.merges, task.size}, begin, end);
  });
}

// dw and, into products[merges, num_experts], dweights of columns begin..end.
inline void expert_merge_backward(const ExpertMergeBackward& task, int64_t begin, int64_t end,
                                  void* products) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    const Rows<const Scalar> dmerged = {static_cast<const Scalar*>(task.dmerged), task.merges,
                                        task.size};
    const Rows<const Scalar> w = {static_cast<const Scalar*>(task.w), task.num_experts, task.size};
    combine<Scalar>(dmerged,
                    Weights<Sum>{static_cast<const Sum*>(task.weights), 1, task.num_experts},
                    {static_cast<Scalar*>(task.dw), task.num_experts, task.size}, begin, end);
    multiply<Scalar>(dmerged, w, begin, end, static_cast<Sum*>(products));
  });
}

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
