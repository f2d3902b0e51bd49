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
// Returns false, and computes nothing, if the product is another library's: blocks are not faster
// here, the product is small, or `a` or `out` has no dense rows, or b neither rows nor columns.
bool packed_product_out(const at::Tensor& out, std::initializer_list<Term> terms, bool accumulate);

// Whether products with x^T as their left factor are computed here, if its rows are dense.
bool packs_outer_products_of(const at::Tensor& x);

}  // namespace moe_parallel
