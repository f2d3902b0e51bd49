#include "block_product.h"

#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <cstring>

#include "cpu/parts.h"
#include "onednn_product.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace moe_parallel {
namespace {

bool is_onednn(ScalarType type) {
#ifdef CPUBLAS_BRGEMM_F32F32F32
  return multiplies_blocks_by_onednn(type);
#else
  return false;
#endif
}

void multiply_by_aten(const BlockProduct& p) {
  const auto type = p.type == ScalarType::kFloat64 ? at::kDouble : at::kFloat;
  const auto matrix = [&](const void* data, int64_t rows, int64_t columns, int64_t stride) {
    return at::from_blob(const_cast<void*>(data), {rows, columns}, {stride, 1},
                         at::TensorOptions().dtype(type));
  };
  const auto a = matrix(p.a, p.m, p.k, p.a_stride), b = matrix(p.b, p.k, p.n, p.b_stride);
  auto c = matrix(p.c, p.m, p.n, p.c_stride);
  if (p.accumulate) {
    at::addmm_out(c, c, a, b);
  } else {
    at::mm_out(c, a, b);
  }
}

#ifdef __SSE2__

__m128i load(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
void store(void* p, __m128i v) { _mm_storeu_si128(static_cast<__m128i*>(p), v); }

// to[c][r] = from[r][c] for 4 rows and columns of words. Distances are in bytes.
void transpose_square(const char* from, int64_t stride, char* to, int64_t to_stride) {
  const __m128i a = load(from), b = load(from + stride), c = load(from + 2 * stride),
                d = load(from + 3 * stride);
  const __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
  const __m128i ab_end = _mm_unpackhi_epi32(a, b), cd_end = _mm_unpackhi_epi32(c, d);
  store(to, _mm_unpacklo_epi64(ab, cd));
  store(to + to_stride, _mm_unpackhi_epi64(ab, cd));
  store(to + 2 * to_stride, _mm_unpacklo_epi64(ab_end, cd_end));
  store(to + 3 * to_stride, _mm_unpackhi_epi64(ab_end, cd_end));
}

// The words of eight columns of two rows, the first row's in the lower halves.
void pair_eight(const uint16_t* even, const uint16_t* odd, uint32_t* to) {
  const __m128i low = load(even), high = load(odd);
  store(to, _mm_unpacklo_epi16(low, high));
  store(to + 4, _mm_unpackhi_epi16(low, high));
}
constexpr int64_t kEight = 8;

#else

constexpr int64_t kEight = INT64_MAX;
void pair_eight(const uint16_t*, const uint16_t*, uint32_t*) {}

#endif

// to[c][r] = from[r][c] for `columns` words, with zeros for the rows from `count` to `padded`. A
// square of rows and columns uses up the cache lines that it touches. Words may be unaligned.
template <class Word>
void transpose(const char* from, int64_t stride, int64_t count, int64_t padded, int64_t columns,
               char* to, int64_t to_stride) {
  constexpr int64_t kEdge = 16, kBytes = sizeof(Word);
  for (int64_t row = 0; row < padded; row += kEdge) {
    const int64_t end = std::min(row + kEdge, padded), filled = std::clamp(count, row, end);
    int64_t column = 0;
#ifdef __SSE2__
    for (; kBytes == 4 && filled == row + kEdge && column + 4 <= columns; column += 4) {
      for (int64_t r = row; r < filled; r += 4) {
        transpose_square(from + r * stride + column * kBytes, stride,
                         to + column * to_stride + r * kBytes, to_stride);
      }
    }
#endif
    for (; column < columns; ++column) {
      char* target = to + column * to_stride;
      for (int64_t r = row; r < filled; ++r) {
        std::memcpy(target + r * kBytes, from + r * stride + column * kBytes, kBytes);
      }
      std::memset(target + filled * kBytes, 0, (end - filled) * kBytes);
    }
  }
}

}  // namespace

bool has_block_products(ScalarType type) {
  return type == ScalarType::kFloat64 || type == ScalarType::kFloat32 || is_onednn(type);
}

void multiply_blocks(const BlockProduct& p) {
#ifdef CPUBLAS_BRGEMM_F32F32F32
  const auto multiply = [&](auto scalar) {
    using Scalar = decltype(scalar);
    at::native::cpublas::brgemm(p.m, p.n, p.k, p.a_stride, p.b_stride, p.c_stride, p.accumulate,
                                static_cast<const Scalar*>(p.a), static_cast<const Scalar*>(p.b),
                                static_cast<float*>(p.c));
  };
  if (p.type == ScalarType::kBFloat16) return multiply(at::BFloat16{});
  if (is_onednn(p.type)) return multiply(float{});
#endif
  multiply_by_aten(p);
}

void end_block_products() {
#ifdef CPUBLAS_BRGEMM_F32F32F32
  if (is_onednn(ScalarType::kFloat32)) at::native::cpublas::brgemm_release();
#endif
}

void pack_left(const PackedRows& x, void* to) {
  const int64_t bytes = bytes_of(x.type);
  const auto* from = static_cast<const char*>(x.rows);
  auto* target = static_cast<char*>(to);
  for (int64_t row = 0; row < x.count; ++row, target += x.width * bytes) {
    std::memcpy(target, from + row * x.stride * bytes, x.width * bytes);
  }
  std::memset(target, 0, (x.padded - x.count) * x.width * bytes);
}

void pack_pairs(const uint16_t* rows, int64_t stride, int64_t count, int64_t padded, int64_t width,
                uint32_t* to) {
  for (int64_t row = 0; row < padded; row += 2, to += width) {
    const uint16_t *even = rows + row * stride, *odd = even + stride;
    if (row + 1 < count) {
      int64_t n = 0;
      for (; n + kEight <= width; n += kEight) pair_eight(even + n, odd + n, to + n);
      for (; n < width; ++n) to[n] = even[n] | uint32_t{odd[n]} << 16;
    } else if (row < count) {
      std::copy(even, even + width, to);
    } else {
      std::fill(to, to + width, 0);
    }
  }
}

void pack_right(const PackedRows& x, void* to) {
  if (x.type != ScalarType::kBFloat16) return pack_left(x, to);
  pack_pairs(static_cast<const uint16_t*>(x.rows), x.stride, x.count, x.padded, x.width,
             static_cast<uint32_t*>(to));
}

void pack_left_transposed(const PackedRows& x, void* to, int64_t to_stride) {
  const auto run = [&](auto word) {
    constexpr int64_t kBytes = sizeof(word);
    transpose<decltype(word)>(static_cast<const char*>(x.rows), x.stride * kBytes, x.count,
                              x.padded, x.width, static_cast<char*>(to), to_stride * kBytes);
  };
  if (x.type == ScalarType::kFloat64) return run(uint64_t{});
  if (x.type == ScalarType::kFloat32) return run(uint32_t{});
  run(uint16_t{});
}

void pack_right_transposed(const PackedRows& x, void* to, int64_t to_stride) {
  if (x.type != ScalarType::kBFloat16) return pack_left_transposed(x, to, to_stride);
  // Two numbers of a row of x are one word, and two rows of x^T that lie side by side.
  transpose<uint32_t>(static_cast<const char*>(x.rows), x.stride * 2, x.count, x.padded,
                      x.width / 2, static_cast<char*>(to), to_stride * 4);
}

}  // namespace moe_parallel
