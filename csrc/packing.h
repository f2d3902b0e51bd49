// Rows in the order that kernels for blocks want (block_product.h), all on one thread.
#pragma once

#include <cstdint>

namespace moe_parallel {

// to[c][r] = from[r][c], and 0 for the rows from `rows` to `padded`. Words have 32 bits and may be
// unaligned; distances between rows are in bytes.
struct TransposeWords {
  const void* from;
  int64_t stride;
  int64_t rows, padded;
  int64_t columns;
  void* to;
  int64_t to_stride;
};

// Two rows side by side, number by number, for every two rows, and zeros for the rows from `count`
// to `padded`, which is even.
struct PairRows {
  const uint16_t* rows;  // [count, width], rows `stride` elements apart
  int64_t stride;
  int64_t count, padded;
  int64_t width;
  uint32_t* to;  // [padded / 2, width]; of a pair, the first row's number is in the lower half
};

void transpose_words(const TransposeWords& task);
void pair_rows(const PairRows& task);

}  // namespace moe_parallel
