#include "scratch_rows.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "alignment.h"
#include "product.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace moe_parallel {
namespace {

#ifdef __SSE2__

constexpr int64_t kEdge = 8;    // of a square of 16-bit numbers in registers
constexpr int64_t kBlock = 32;  // rows and columns whose cache lines are used up at once

__m128i load(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
void store(uint16_t* p, __m128i v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v); }

// to[c][r] = from[r][c] for 8 rows and columns.
void transpose_square(const uint16_t* from, int64_t from_stride, uint16_t* to, int64_t to_stride) {
  __m128i rows[kEdge], pairs[kEdge], fours[kEdge];
  for (int64_t r = 0; r < kEdge; ++r) rows[r] = load(from + r * from_stride);
  // Columns 0..3 and 4..7 of two rows, then of four, then of eight.
  for (int64_t i = 0; i < 4; ++i) {
    pairs[i] = _mm_unpacklo_epi16(rows[2 * i], rows[2 * i + 1]);
    pairs[4 + i] = _mm_unpackhi_epi16(rows[2 * i], rows[2 * i + 1]);
  }
  for (int64_t i = 0; i < 4; ++i) {
    fours[2 * i] = _mm_unpacklo_epi32(pairs[2 * i], pairs[2 * i + 1]);
    fours[2 * i + 1] = _mm_unpackhi_epi32(pairs[2 * i], pairs[2 * i + 1]);
  }
  // fours[0], [1]: columns 01 and 23 of rows 0..3; [2], [3]: of rows 4..7; [4] on: columns 4..7.
  for (int64_t half = 0; half < 2; ++half) {
    for (int64_t i = 0; i < 2; ++i) {
      const __m128i top = fours[4 * half + i], bottom = fours[4 * half + 2 + i];
      uint16_t* column = to + (4 * half + 2 * i) * to_stride;
      store(column, _mm_unpacklo_epi64(top, bottom));
      store(column + to_stride, _mm_unpackhi_epi64(top, bottom));
    }
  }
}

struct Matrix {
  const uint16_t* data;
  int64_t rows, columns, stride;
};

// The columns first..last of `from`, as rows of `to`. The end of each row becomes zero, because
// oneDNN multiplies the number after an odd one by zero, which would leave a NaN.
void transpose_columns(const Matrix& from, uint16_t* to, int64_t to_stride, int64_t first,
                       int64_t last) {
  for (int64_t column = first; column < last; ++column) {
    std::fill(to + column * to_stride + from.rows, to + (column + 1) * to_stride, uint16_t{0});
  }
  for (int64_t row = 0; row < from.rows; row += kEdge) {
    const bool whole_rows = row + kEdge <= from.rows;
    for (int64_t column = first; column < last; column += kEdge) {
      const uint16_t* source = from.data + row * from.stride + column;
      uint16_t* target = to + column * to_stride + row;
      if (whole_rows && column + kEdge <= last) {
        transpose_square(source, from.stride, target, to_stride);
        continue;
      }
      for (int64_t r = 0; r < std::min(kEdge, from.rows - row); ++r) {
        for (int64_t c = 0; c < std::min(kEdge, last - column); ++c) {
          target[c * to_stride + r] = source[r * from.stride + c];
        }
      }
    }
  }
}

#endif

}  // namespace

at::Tensor TransposedRows::of(const at::Tensor& x) {
#ifdef __SSE2__
  if (x.scalar_type() != at::kBFloat16 || !is_compiled_for_its_sizes(x)) return x.t();
  constexpr int64_t kLine = kCacheLine / sizeof(uint16_t);
  const int64_t rows = x.size(0), columns = x.size(1);
  // An odd number of cache lines: rows that are a power of two apart would share cache sets.
  const int64_t stride = ((rows + kLine - 1) / kLine | 1) * kLine;
  if (!memory_) memory_.emplace(x, 0, 1);
  const auto transposed = memory_->rows(columns * stride);
  const auto dense = x.stride(1) == 1 ? x : x.contiguous();
  const Matrix from{static_cast<const uint16_t*>(dense.const_data_ptr()), rows, columns,
                    dense.stride(0)};
  auto* to = static_cast<uint16_t*>(transposed.mutable_data_ptr());
  const int64_t blocks = (columns + kBlock - 1) / kBlock;
  at::parallel_for(0, blocks, std::max<int64_t>(1, 32768 / (kBlock * std::max<int64_t>(rows, 1))),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t block = begin; block < end; ++block) {
                       transpose_columns(from, to, stride, block * kBlock,
                                         std::min(columns, (block + 1) * kBlock));
                     }
                   });
  return transposed.as_strided({columns, rows}, {stride, 1});
#else
  return x.t();
#endif
}

}  // namespace moe_parallel
