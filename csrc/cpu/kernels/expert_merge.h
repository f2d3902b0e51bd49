#pragma once

#include "../../expert_merge.h"
#include "../capability.h"
#include "vectors.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

// The rows of one matrix, `stride` elements apart.
template <class Element>
struct Rows {
  Element* first;
  int64_t count;
  int64_t stride;

  Element* operator[](int64_t row) const { return first + row * stride; }
};

// weights[out, in], stored in either order.
template <class Sum>
struct Weights {
  const Sum* first;
  int64_t out_stride;
  int64_t in_stride;

  Sum at(int64_t out, int64_t in) const { return first[out * out_stride + in * in_stride]; }
};

constexpr int kTileRows = 4;
constexpr int kTileVectors = kRegisterBytes == 64 ? 4 : 2;  // a tile's sums stay in registers

// Copies columns of all rows side by side, converted to the type of sums, in complete vectors. Rows
// whose distance is a power of two, as in weights, share cache sets, so the caches hold only a few
// of them at a time. They hold all rows of the copy. Here and below, the next elements are
// prefetched, because the hardware does not foresee so many rows.
template <class Scalar>
inline Rows<const sum_t<Scalar>> pack(Rows<const Scalar> rows, int64_t column, int64_t columns,
                                      sum_t<Scalar>* to) {
  using Sum = sum_t<Scalar>;
  for (int64_t row = 0; row < rows.count; ++row) {
    for_columns<Sum>(columns, [&](int64_t i, auto lanes) {
      prefetch<1>(rows[row] + column + kMergeColumns + i);
      store(to + row * kMergeStride + i, lanes.load(rows[row] + column + i));
    });
  }
  return {to, rows.count, kMergeStride};
}

// out[row + r] = sum over i of weights[row + r, i] * in[i], for kVectors vectors of columns.
template <int kRows, int kVectors, class Scalar, class Lanes>
inline void combine_tile(Rows<const sum_t<Scalar>> in, Weights<sum_t<Scalar>> weights,
                         Rows<Scalar> out, int64_t row, int64_t column, Lanes lanes) {
  using Sum = sum_t<Scalar>;
  Vector<Sum> sums[kRows][kVectors] = {};
  for (int r = 0; r < kRows; ++r) {
    prefetch<kVectors>(out[row + r] + column + 2 * kVectors * kLanes<Sum>);
  }
  for (int64_t i = 0; i < in.count; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      const Vector<Sum> values = load(in[i] + column + v * kLanes<Sum>);
      for (int r = 0; r < kRows; ++r) sums[r][v] += weights.at(row + r, i) * values;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      lanes.store(out[row + r] + column + v * kLanes<Sum>, sums[r][v]);
    }
  }
}

template <int kRows, class Scalar>
inline void combine_rows(Rows<const sum_t<Scalar>> in, Weights<sum_t<Scalar>> weights,
                         Rows<Scalar> out, int64_t row, int64_t columns) {
  using Sum = sum_t<Scalar>;
  constexpr int64_t kColumns = kTileVectors * kLanes<Sum>;
  int64_t column = 0;
  for (; column + kColumns <= columns; column += kColumns) {
    combine_tile<kRows, kTileVectors>(in, weights, out, row, column, AllLanes{});
  }
  for_columns<Sum>(columns - column, [&](int64_t i, auto lanes) {
    combine_tile<kRows, 1>(in, weights, out, row, column + i, lanes);
  });
}

// out = weights in
template <class Scalar>
inline void combine(Rows<const sum_t<Scalar>> in, Weights<sum_t<Scalar>> weights, Rows<Scalar> out,
                    int64_t columns) {
  int64_t row = 0;
  for (; row + kTileRows <= out.count; row += kTileRows) {
    combine_rows<kTileRows>(in, weights, out, row, columns);
  }
  for (; row < out.count; ++row) combine_rows<1>(in, weights, out, row, columns);
}

// products[row + r, col + c] += a[row + r] * b[col + c], separately for each lane of the vectors.
template <int kRows, int kCols, class Sum>
inline void multiply_tile(Rows<const Sum> a, Rows<const Sum> b, int64_t row, int64_t col,
                          int64_t columns, Sum* products) {
  const auto product = [&](int r, int c) {
    return products + ((row + r) * b.count + col + c) * kLanes<Sum>;
  };
  Vector<Sum> sums[kRows][kCols];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) sums[r][c] = load(product(r, c));
  }
  for (int64_t i = 0; i < columns; i += kLanes<Sum>) {
    Vector<Sum> of_a[kRows];
    for (int r = 0; r < kRows; ++r) of_a[r] = load(a[row + r] + i);
    for (int c = 0; c < kCols; ++c) {
      const Vector<Sum> of_b = load(b[col + c] + i);
      for (int r = 0; r < kRows; ++r) sums[r][c] += of_a[r] * of_b;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) store(product(r, c), sums[r][c]);
  }
}

template <int kRows, class Sum>
inline void multiply_rows(Rows<const Sum> a, Rows<const Sum> b, int64_t row, int64_t columns,
                          Sum* products) {
  int64_t col = 0;
  for (; col + kTileVectors <= b.count; col += kTileVectors) {
    multiply_tile<kRows, kTileVectors>(a, b, row, col, columns, products);
  }
  for (; col < b.count; ++col) multiply_tile<kRows, 1>(a, b, row, col, columns, products);
}

// products += a b^T
template <class Sum>
inline void multiply(Rows<const Sum> a, Rows<const Sum> b, int64_t columns, Sum* products) {
  int64_t row = 0;
  for (; row + kTileRows <= a.count; row += kTileRows) {
    multiply_rows<kTileRows>(a, b, row, columns, products);
  }
  for (; row < a.count; ++row) multiply_rows<1>(a, b, row, columns, products);
}

// Calls body(column, columns) for every block of columns that is packed at once.
template <class Body>
inline void for_blocks(int64_t begin, int64_t end, const Body& body) {
  for (int64_t column = begin; column < end; column += kMergeColumns) {
    body(column, end - column < kMergeColumns ? end - column : kMergeColumns);
  }
}

inline void expert_merge(const ExpertMerge& task, int64_t begin, int64_t end, void* scratch) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    const Rows<const Scalar> w = {static_cast<const Scalar*>(task.w), task.num_experts, task.size};
    const Weights<Sum> weights = {static_cast<const Sum*>(task.weights), task.num_experts, 1};
    auto* merged = static_cast<Scalar*>(task.merged);
    for_blocks(begin, end, [&](int64_t column, int64_t columns) {
      const auto packed = pack(w, column, columns, static_cast<Sum*>(scratch));
      const Rows<Scalar> out = {merged + column, task.merges, task.size};
      combine(packed, weights, out, columns);
    });
  });
}

// Computes the columns begin..end of dw, and their contribution to dweights, which is
// products[merges, num_experts].
inline void expert_merge_backward(const ExpertMergeBackward& task, int64_t begin, int64_t end,
                                  void* scratch, void* products) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    const Rows<const Scalar> dmerged = {static_cast<const Scalar*>(task.dmerged), task.merges,
                                        task.size};
    const Rows<const Scalar> w = {static_cast<const Scalar*>(task.w), task.num_experts, task.size};
    const Weights<Sum> weights = {static_cast<const Sum*>(task.weights), 1, task.num_experts};
    auto* dw = static_cast<Scalar*>(task.dw);
    auto* for_dmerged = static_cast<Sum*>(scratch);
    auto* for_w = for_dmerged + task.merges * kMergeStride;
    auto* sums = for_w + task.num_experts * kMergeStride;
    const int64_t num_products = task.merges * task.num_experts;
    std::memset(sums, 0, num_products * kRegisterBytes);
    for_blocks(begin, end, [&](int64_t column, int64_t columns) {
      const auto packed = pack(dmerged, column, columns, for_dmerged);
      const Rows<Scalar> out = {dw + column, task.num_experts, task.size};
      combine(packed, weights, out, columns);
      multiply(packed, pack(w, column, columns, for_w), columns, sums);
    });
    for (int64_t i = 0; i < num_products; ++i) {
      static_cast<Sum*>(products)[i] = sum_of_lanes<Sum>(load(sums + i * kLanes<Sum>));
    }
  });
}

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
