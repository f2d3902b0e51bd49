// The code that the fused layers share: the rows of each expert, the blocks of rows that are
// computed at a time, and the gradients of the experts' weights.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "grouped_gemm.h"
#include "launch.h"
#include "onednn_product.h"
#include "permute_tensors.h"
#include "product.h"
#include "scratch_rows.h"

namespace moe_parallel {

// Consecutive experts whose rows are computed together, or a part of the rows of one expert.
//
// A product may have more rows than the block. In scratch memory they are zeros. In the output of
// all rows, the next block overwrites them. The reason: oneDNN compiles a product in bf16 for its
// exact sizes, which takes 3 ms (0.5 ms in fp32), and each expert has another number of rows in
// each step.
struct RowBlock {
  int64_t first_expert;
  int64_t num_experts;
  int64_t first_row;
  int64_t num_rows;
  int64_t product_rows;
  bool begins_expert;         // no block before has rows of the expert
  at::Tensor product_counts;  // the rows of each expert in products

  // The block's part of a tensor with one entry per row, of a tensor with one entry per expert, and
  // of scratch memory for the largest block.
  at::Tensor rows(const at::Tensor& t) const { return t.narrow(0, first_row, num_rows); }
  at::Tensor experts(const at::Tensor& w) const { return w.narrow(0, first_expert, num_experts); }
  at::Tensor part(ScratchRows& memory) const { return memory.rows(num_rows); }

  // The rows of products: of a tensor that new_rows() made, and of scratch memory whose part() has
  // been written.
  at::Tensor product(const at::Tensor& t) const { return t.narrow(0, first_row, product_rows); }
  at::Tensor product(ScratchRows& memory) const {
    auto rows = memory.rows(product_rows);
    if (product_rows > num_rows) rows.narrow(0, num_rows, product_rows - num_rows).zero_();
    return rows;
  }
};

// The row map of a layer. The constructor checks it once.
class ExpertRows {
 public:
  ExpertRows(const at::Tensor& x, const at::Tensor& probs, const at::Tensor& slots,
             const at::Tensor& rows, const at::Tensor& counts)
      : slots_(slots.contiguous()), rows_(rows.contiguous()) {
    check_dim("x", x, 2);
    check_index("slots", slots, 1);
    check_index("rows", rows, 2);
    check_together(x, {probs, slots, rows});
    TORCH_CHECK_VALUE(rows.size(0) == x.size(0), "x has ", x.size(0), " tokens, the row map ",
                      rows.size(0));
    check_sizes("probs", probs, rows.sizes());
    TORCH_CHECK_TYPE(probs.scalar_type() == sum_type_of(x), "probs must be ", sum_type_of(x),
                     " for tokens of ", x.scalar_type(), ", not ", probs.scalar_type());
    check_groups("slots", slots.unsqueeze(1), counts);
    if (counts.is_cpu()) {
      add_blocks(x, counts.contiguous());
    } else {
      blocks_.push_back({0, counts.size(0), 0, size(), size(), true, counts});
    }
  }

  int64_t size() const { return slots_.size(0); }

  // Memory for all rows, in which RowBlock::product() of every block fits.
  at::Tensor new_rows(const at::Tensor& like, int64_t columns) const {
    return like.new_empty({size() + spare_rows_, columns});
  }
  // The rows without those that only products need; of memory that is not used, nothing.
  at::Tensor only_rows(const at::Tensor& memory) const {
    return memory.narrow(0, 0, std::min(size(), memory.size(0)));
  }

  // The blocks of rows to compute. On the CPU there is one block per expert, so that the
  // intermediate results stay in the caches and their memory is reused. On CUDA one block has all
  // experts, because the host does not know the counts. Rows of no expert are not computed.
  const std::vector<RowBlock>& blocks() const { return blocks_; }

  // Scratch memory for the rows of one block at a time.
  static ScratchRows scratch(const at::Tensor& like, const std::vector<RowBlock>& blocks,
                             int64_t columns) {
    int64_t most_rows = 0;
    for (const auto& block : blocks) most_rows = std::max(most_rows, block.product_rows);
    return {like, most_rows, columns};
  }

  // The block's rows for a product, in `memory`: x[token of row n], or zeros in a padding row.
  at::Tensor gather(ScratchRows& memory, const at::Tensor& x, const RowBlock& block) const {
    return gather_slots(memory, x, block, rows_.size(1));
  }

  // The same of choices[slot of row n]. `choices` has one row per choice: [tokens * choices,
  // width].
  at::Tensor gather_choices(ScratchRows& memory, const at::Tensor& choices,
                            const RowBlock& block) const {
    return gather_slots(memory, choices, block, 1);
  }

  // The inverse of gather_choices() as [tokens, choices, width], with zeros for a choice without a
  // row.
  at::Tensor by_choice(const at::Tensor& y) const {
    auto out = y.new_empty({rows_.size(0), rows_.size(1), y.size(1)});
    gather_rows_out(out.flatten(0, 1), y, rows_, 1);
    return out;
  }

  // The sum of each token's rows.
  at::Tensor sum(const at::Tensor& y) const {
    return sum_to(y.new_empty({rows_.size(0), y.size(1)}), y);
  }

  // The same as a tensor whose rows are as far apart as those of the tokens x.
  at::Tensor sum_like(const at::Tensor& x, const at::Tensor& y) const {
    const int64_t columns = x.size(1), apart = std::max(x.stride(0), columns);
    return sum_to(y.new_empty({rows_.size(0), apart}).narrow(1, 0, columns), y);
  }

  // The prob of each row, or 0 for a padding row.
  at::Tensor probs_by_row(const at::Tensor& probs) const { return values_by_row(probs); }

  // The value of each row's choice, or 0 for a padding row; the inverse of values_by_choice().
  at::Tensor values_by_row(const at::Tensor& values) const { return pick(values, slots_); }

  // The value of each choice's row, or 0 for a choice without a row.
  at::Tensor values_by_choice(const at::Tensor& values) const {
    return pick(values, rows_.flatten()).view(rows_.sizes());
  }

 private:
  at::Tensor sum_to(at::Tensor out, const at::Tensor& y) const {
    sum_rows_out(out, y, rows_);
    return out;
  }

  // values[index[n]], or 0 where the index is negative. To the kernel a value is a row.
  static at::Tensor pick(const at::Tensor& values, const at::Tensor& index) {
    auto picked = at::empty(index.sizes(), values.options());
    gather_rows_out(picked.view({-1, 1}), values.contiguous().view({-1, 1}), index, 1);
    return picked;
  }

  at::Tensor gather_slots(ScratchRows& memory, const at::Tensor& x, const RowBlock& block,
                          int64_t choices) const {
    auto out = block.part(memory);
    const bool all = block.num_rows == size() && choices == rows_.size(1);
    gather_rows_out(out, x, block.rows(slots_), choices,
                    all ? rows_.const_data_ptr<int64_t>() : nullptr);
    return block.product(memory);
  }

  void add_blocks(const at::Tensor& x, const at::Tensor& counts) {
    const int64_t experts = counts.size(0), all_rows = counts.sum().item<int64_t>();
    const bool rounds = is_compiled_for_its_sizes(x);
    int64_t first = 0;
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t rows = counts.const_data_ptr<int64_t>()[e];
      const int64_t parts = parts_of(rows, all_rows, x, experts);
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t own = rows / parts + (part < rows % parts);
        const int64_t of_products = rounds ? rounded_rows(own) : own;
        blocks_.push_back({e, 1, first, own, of_products, part == 0,
                           at::full({1}, of_products, counts.options())});
        spare_rows_ = std::max(spare_rows_, first + of_products - size());
        first += own;
      }
    }
  }

  // Scratch memory is as large as the largest block, so an expert with more than twice its share of
  // the rows is computed in parts. In 16 bits they are few, because each one rounds the sum of the
  // weight gradients once more, unless main gradients take it.
  static int64_t parts_of(int64_t rows, int64_t all_rows, const at::Tensor& x, int64_t experts) {
    constexpr int64_t kLeastRows = 512;  // fewer would slow the products down
    constexpr int64_t kMostParts = 4;    // in 16 bits
    const int64_t most_rows = std::max(kLeastRows, 2 * all_rows / std::max<int64_t>(experts, 1));
    const int64_t parts = (rows + most_rows - 1) / most_rows;
    return x.element_size() < 4 ? std::min(parts, kMostParts) : parts;
  }

  at::Tensor slots_, rows_;
  std::vector<RowBlock> blocks_;
  int64_t spare_rows_ = 0;  // that a product may write after the last row
};

// The gradient of a weight [experts, ...]. It is a tensor of its own, or it is added to a main
// gradient.
class WeightGradient {
 public:
  // `memory`: for a transposed copy; all gradients of a layer share it. `main`: the main gradient,
  // if there is one. It has the weight's type or a wider one.
  WeightGradient(const char* name, const at::Tensor& w, const at::Tensor& counts,
                 TransposedRows& memory, const std::optional<at::Tensor>& main = std::nullopt)
      : memory_(memory),
        own_(main ? w.new_empty({0}) : at::empty_like(w)),  // as w lies in memory
        sum_(main.value_or(own_)),
        adds_(main.has_value()) {
    if (adds_) {
      check_sizes(name, sum_, w.sizes());
      check_together(w, {sum_});
      const auto wide = sum_type_of(w);
      TORCH_CHECK_TYPE(sum_.scalar_type() == w.scalar_type() || sum_.scalar_type() == wide, name,
                       " is ", sum_.scalar_type(), ", its weight ", w.scalar_type(),
                       ": it must be ", wide, " or as the weight");
    } else if (counts.is_cpu()) {
      clear_without_rows(counts);
    }
  }

  // x[rows of e]^T y[rows of e] for each expert e of the block, which is added to that of the
  // blocks before if they have rows of e.
  void take(const RowBlock& block, const at::Tensor& x, const at::Tensor& y) {
    grouped_outer_out(block.experts(sum_), x, y, block.product_counts,
                      adds_ || !block.begins_expert, memory_);
  }

  // The tensor that the operator returns. It is empty if the gradient is added to a main gradient.
  const at::Tensor& own() const { return own_; }

 private:
  // On the CPU, an expert without rows is in no block, so take() does not write its gradient.
  void clear_without_rows(const at::Tensor& counts) {
    const auto on_host = counts.contiguous();
    for (int64_t e = 0; e < on_host.size(0); ++e) {
      if (on_host.const_data_ptr<int64_t>()[e] == 0) own_.select(0, e).zero_();
    }
  }

  TransposedRows& memory_;
  at::Tensor own_, sum_;
  bool adds_;
};

}  // namespace moe_parallel
