// Large products on the CPU, from products of blocks that stay in the caches (block_product.h). A
// panel of columns of the right factor is packed once for all rows of the left one, block by block.
#pragma once

#include <ATen/core/Tensor.h>

#include "fused_product.h"

namespace moe_parallel {

// A product with its epilogue, which takes the sums of a panel from the caches. In bf16 sums are
// computed in fp32 and rounded once. Returns false, and computes nothing, where its sizes do not
// pay, this processor or setting packs nothing, K is odd in bf16 (with AMX, where a size is no
// multiple of 32), rows of a factor overlap, the product has several groups, or no code is here for
// the epilogue.
bool packed_product(const FusedProduct& product, const Epilogue& epilogue);

// out = a b, or out += a b. `blocks` are those of b, if it was packed.
struct RightProduct {
  at::Tensor out, b;
  bool accumulate;
  at::Tensor blocks = {};
};

// All products with this left factor in one: threads share the panels of all right factors. Returns
// false as above, and where a or an `out` has no dense rows or a b neither dense rows nor dense
// columns.
bool packed_products_out(const at::Tensor& a, c10::ArrayRef<RightProduct> products);

// Whether products with x^T as their left factor, and enough columns, are computed here if its rows
// are dense.
bool packs_outer_products_of(const at::Tensor& x);

// A right factor to be packed, once for several products.
struct RightFactor {
  ScalarType type;
  GroupedMatrix matrix;
  int64_t depth, columns;
};

// Whether products read such blocks in place of the factor. Only in bf16 was this faster than
// packing in each product.
bool keeps_blocks(ScalarType type, int64_t depth, int64_t columns);

// Writes depth * columns numbers.
void pack_right_factor(const RightFactor& factor, void* to);

}  // namespace moe_parallel
