// The conditions of all epilogues for a product. Torch-free.
#pragma once

#include <initializer_list>

#include "../../fused_product.h"

namespace moe_parallel::fused {

enum class Layout { kByRows, kByColumns, kAny };

enum class Accumulators { kFirst, kBoth };

// Whether the kernels support the product: 16-bit elements, a GPU with sm_80 or later, rows and
// addresses that are multiples of 16 bytes, all matrices in one layout, and every part for these
// accumulators.
bool takes(const FusedProduct& product, Layout layout,
           Accumulators accumulators = Accumulators::kBoth);

// Whether gated.cuh's kernel supports the product: as above, with one row-major matrix per group.
bool takes_gate(const FusedProduct& product);

// Whether an epilogue can read and write 16 bytes at a time. A null address, of a tensor that is
// not needed, counts as aligned.
bool takes_rows(std::initializer_list<const void*> addresses,
                std::initializer_list<int64_t> strides);

// Whether the matrices of a supported product are column-major.
bool lies_by_columns(const FusedProduct& product);

}  // namespace moe_parallel::fused
