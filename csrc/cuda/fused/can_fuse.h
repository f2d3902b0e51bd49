// What all epilogues ask of a product. Torch-free.
#pragma once

#include <initializer_list>

#include "../../fused_product.h"

namespace moe_parallel::fused {

enum class Layout { kByRows, kByColumns, kAny };

// A product of 16-bit elements on a GPU from sm_80 on, whose rows are multiples of 16 bytes from
// addresses that are, with matrices in one layout.
bool takes(const FusedProduct& product, Layout layout);

// Whether an epilogue can move 16 bytes at a time; a null address, of what is not wanted, is one.
bool takes_rows(std::initializer_list<const void*> addresses,
                std::initializer_list<int64_t> strides);

// Of a product that is taken.
bool lies_by_columns(const FusedProduct& product);

}  // namespace moe_parallel::fused
