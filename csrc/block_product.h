// Products of small dense matrices that stay in the caches, on one thread: c = a b or c += a b.
//
// oneDNN's kernel for blocks computes them where it is faster (onednn_product.h), and at::mm
// elsewhere. The kernel wants the right factor in bf16 with two rows side by side, number by
// number. It is compiled for each size, so sizes should be multiples of kBlockUnit, and their
// number small.
#pragma once

#include <cstdint>

#include "scalar_type.h"

namespace moe_parallel {

constexpr int64_t kBlockUnit = 32;

// Whether factors of this type can be multiplied. fp32 and fp64 always can.
bool has_block_products(ScalarType type);

// [m, k] x [k, n] -> [m, n]. Rows are dense. Distances between rows are in elements; in bf16, two
// rows of b that lie side by side count as one row of b_stride pairs.
struct BlockProduct {
  ScalarType type;  // of a and b; c has the type of sums
  int64_t m, n, k;  // k is even in bf16
  const void* a;
  int64_t a_stride;
  const void* b;  // packed
  int64_t b_stride;
  void* c;
  int64_t c_stride;
  bool accumulate;
};

void multiply_blocks(const BlockProduct& product);

// To be called on a thread after its last product.
void end_block_products();

// Rows of a tensor. Packing adds rows of zeros up to `padded`, which is even in bf16.
struct PackedRows {
  ScalarType type;
  const void* rows;
  int64_t stride;
  int64_t count, padded;
  int64_t width;  // even in bf16, for pack_right_transposed()
};

// The four factors of rows x: x as left factor, [padded, width], and as right factor; x^T as left
// factor, [width, to_stride], and as right factor. In a packed x, rows are `width` apart.
void pack_left(const PackedRows& x, void* to);
void pack_right(const PackedRows& x, void* to);
void pack_left_transposed(const PackedRows& x, void* to, int64_t to_stride);
void pack_right_transposed(const PackedRows& x, void* to, int64_t to_stride);

// Two tasks of packing, of which each capability of the processor has a kernel (cpu/capability.h).

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

}  // namespace moe_parallel
