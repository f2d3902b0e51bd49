// Weights that are packed before the products that read them (packed_product.h), because they stay
// as they are in several products: those of the micro-batches of a step.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "launch.h"

namespace moe_parallel {

constexpr int64_t kPanel = 128;  // columns that are packed together

// The matrices of groups, and their blocks if they were packed.
struct GroupedWeights {
  at::Tensor matrices;  // [groups, depth, columns], or a transposed view of that
  at::Tensor blocks;    // [groups, depth * columns] of pack_weights(); undefined: not packed

  GroupedWeights() = default;
  GroupedWeights(at::Tensor w, at::Tensor blocks_of_w = {})
      : matrices(std::move(w)), blocks(std::move(blocks_of_w)) {}

  bool defined() const { return matrices.defined(); }
  bool is_packed() const { return blocks.defined(); }

  GroupedWeights of_groups(int64_t first, int64_t count) const {
    return {matrices.narrow(0, first, count),
            is_packed() ? blocks.narrow(0, first, count) : blocks};
  }

  // Part i of `parts` that lie side by side, and were packed as such.
  GroupedWeights part(int64_t i, int64_t parts) const {
    const auto narrowed = [&](const at::Tensor& t, int64_t dim) {
      const int64_t size = t.size(dim) / parts;
      return t.narrow(dim, i * size, size);
    };
    return {narrowed(matrices, 2), is_packed() ? narrowed(blocks, 1) : blocks};
  }

  // All parts as one right factor. Its blocks are theirs if no panel has columns of two parts.
  GroupedWeights joined(int64_t parts) const {
    const bool has_blocks = is_packed() && matrices.size(2) / parts % kPanel == 0;
    return {matrices, has_blocks ? blocks : at::Tensor()};
  }
};

// A list of packed weights has `count` entries, or none: nothing is packed.
inline void check_packed(at::TensorList packed, size_t count) {
  TORCH_CHECK_VALUE(packed.empty() || packed.size() == count, "packed must have ", count,
                    " tensors or none, not ", packed.size());
}

// w with entry i of such a list, which is empty where pack_weights() packed nothing.
inline GroupedWeights with_blocks(const at::Tensor& w, at::TensorList packed, size_t i) {
  if (packed.empty() || packed[i].numel() == 0) return w;
  check_together(w, {packed[i]});
  check_same_type("packed", packed[i], "its weight", w);
  check_sizes("packed", packed[i], {w.size(0), w.size(1) * w.size(2)});
  return {w, packed[i]};
}

}  // namespace moe_parallel
