#pragma once

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "../../block_product.h"
#include "vectors.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

// Rows of a large matrix lie in different pages, and the hardware does not prefetch across pages.
constexpr int64_t kRowsAhead = 16;  // prefetched by pair_rows()
constexpr int64_t kLinesAhead = 4;  // of each row, prefetched by transpose_words()

#if MOE_PARALLEL_VECTOR_BYTES == 64

constexpr int64_t kSquare = 16;  // rows and columns that are transposed in registers

// GCC warns of undefined values in the intrinsics without a mask, as in vectors.h.
constexpr uint16_t kFullMask = 0xffff;

inline void transpose_square(const char* from, int64_t stride, char* to, int64_t to_stride) {
  __m512i a[16], b[16];
  for (int64_t r = 0; r < 16; ++r) {
    __builtin_prefetch(from + r * stride + kLinesAhead * kCacheLine);
    a[r] = read<__m512i>(from + r * stride);
  }
  for (int64_t r = 0; r < 16; r += 2) {
    b[r] = _mm512_maskz_unpacklo_epi32(kFullMask, a[r], a[r + 1]);
    b[r + 1] = _mm512_maskz_unpackhi_epi32(kFullMask, a[r], a[r + 1]);
  }
  // a[r + c] for r = 0, 4, 8, 12 and c = 0..3: in quarter q, column 4 q + c of the rows r..r + 3.
  for (int64_t r = 0; r < 16; r += 4) {
    for (int64_t half = 0; half < 2; ++half) {
      a[r + 2 * half] = _mm512_maskz_unpacklo_epi64(0xff, b[r + half], b[r + 2 + half]);
      a[r + 2 * half + 1] = _mm512_maskz_unpackhi_epi64(0xff, b[r + half], b[r + 2 + half]);
    }
  }
  constexpr int kEven = 0b10001000, kOdd = 0b11011101;  // quarters of both factors
  for (int64_t c = 0; c < 4; ++c) {
    const __m512i top_even = _mm512_maskz_shuffle_i32x4(kFullMask, a[c], a[4 + c], kEven);
    const __m512i top_odd = _mm512_maskz_shuffle_i32x4(kFullMask, a[c], a[4 + c], kOdd);
    const __m512i end_even = _mm512_maskz_shuffle_i32x4(kFullMask, a[8 + c], a[12 + c], kEven);
    const __m512i end_odd = _mm512_maskz_shuffle_i32x4(kFullMask, a[8 + c], a[12 + c], kOdd);
    write(to + c * to_stride, _mm512_maskz_shuffle_i32x4(kFullMask, top_even, end_even, kEven));
    write(to + (4 + c) * to_stride, _mm512_maskz_shuffle_i32x4(kFullMask, top_odd, end_odd, kEven));
    write(to + (8 + c) * to_stride,
          _mm512_maskz_shuffle_i32x4(kFullMask, top_even, end_even, kOdd));
    write(to + (12 + c) * to_stride, _mm512_maskz_shuffle_i32x4(kFullMask, top_odd, end_odd, kOdd));
  }
}

#elif defined(__SSE2__)

constexpr int64_t kSquare = 4;

inline void transpose_square(const char* from, int64_t stride, char* to, int64_t to_stride) {
  const auto a = read<__m128i>(from), b = read<__m128i>(from + stride),
             c = read<__m128i>(from + 2 * stride), d = read<__m128i>(from + 3 * stride);
  const __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
  const __m128i ab_end = _mm_unpackhi_epi32(a, b), cd_end = _mm_unpackhi_epi32(c, d);
  write(to, _mm_unpacklo_epi64(ab, cd));
  write(to + to_stride, _mm_unpackhi_epi64(ab, cd));
  write(to + 2 * to_stride, _mm_unpacklo_epi64(ab_end, cd_end));
  write(to + 3 * to_stride, _mm_unpackhi_epi64(ab_end, cd_end));
}

#else

constexpr int64_t kSquare = 1;

inline void transpose_square(const char* from, int64_t, char* to, int64_t) {
  write(to, read<uint32_t>(from));
}

#endif

// 16 words are one cache line of `to`, so a band of 16 rows writes whole lines.
inline void transpose_words(const TransposeWords& task) {
  constexpr int64_t kBand = 16, kBytes = 4;
  const auto* from = static_cast<const char*>(task.from);
  auto* to = static_cast<char*>(task.to);
  for (int64_t row = 0; row < task.padded; row += kBand) {
    const int64_t end = row + kBand < task.padded ? row + kBand : task.padded;
    const int64_t filled = task.rows < row ? row : task.rows < end ? task.rows : end;
    int64_t column = 0;
    for (; filled == row + kBand && column + kSquare <= task.columns; column += kSquare) {
      for (int64_t r = row; r < filled; r += kSquare) {
        transpose_square(from + r * task.stride + column * kBytes, task.stride,
                         to + column * task.to_stride + r * kBytes, task.to_stride);
      }
    }
    for (; column < task.columns; ++column) {
      char* target = to + column * task.to_stride;
      for (int64_t r = row; r < end; ++r) {
        const char* source = from + r * task.stride + column * kBytes;
        write(target + r * kBytes, r < filled ? read<uint32_t>(source) : 0);
      }
    }
  }
}

inline void pair_rows(const PairRows& task) {
  uint32_t* to = task.to;
  for (int64_t row = 0; row < task.padded; row += 2, to += task.width) {
    const uint16_t *even = task.rows + row * task.stride, *odd = even + task.stride;
    int64_t n = 0;
    for (; row + 1 < task.count && n + kLanes<uint32_t> <= task.width; n += kLanes<uint32_t>) {
      __builtin_prefetch(even + kRowsAhead * task.stride + n);
      __builtin_prefetch(odd + kRowsAhead * task.stride + n);
      write(to + n, pairs_of(even + n, odd + n));
    }
    for (; n < task.width; ++n) {
      const uint32_t low = row < task.count ? even[n] : 0;
      const uint32_t high = row + 1 < task.count ? odd[n] : 0;
      to[n] = low | high << 16;
    }
  }
}

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
