// Large products on the CPU, from products of blocks that stay in the caches (block_product.h). A
// panel of columns of the right factor is packed once for all rows of the left one, block by block.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>

namespace moe_parallel {

// One product of a sum: a b, [M, K] x [K, N]. Each may have another K.
struct Term {
  at::Tensor a;
  at::Tensor b;
};

// out = the sum of the terms, or out += it. In bf16 the sum is computed in fp32 and rounded once.
// Returns false, and computes nothing, where another library computes the product: its sizes do not
// pay, K is odd in bf16, `a` or `out` has no dense rows, or `b` neither dense rows nor dense
// columns.
bool packed_product_out(const at::Tensor& out, std::initializer_list<Term> terms, bool accumulate);

// Whether products with x^T as their left factor, and enough columns, are computed here if its rows
// are dense.
bool packs_outer_products_of(const at::Tensor& x);

}  // namespace moe_parallel
