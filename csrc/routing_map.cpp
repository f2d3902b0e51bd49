#include "routing_map.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "launch.h"
#include "routing_map_counts.h"

namespace moe_parallel {
namespace {

// Only called on the CPU: on CUDA, the check would have to wait for the device. There, a choice
// beyond the experts or the rows is left out; with max_rows, one beyond the rows is here, too.
void check_counts(const at::Tensor& chosen, int64_t elsewhere, std::optional<int64_t> limit) {
  TORCH_CHECK_VALUE(elsewhere == 0, "an expert was chosen beyond the ", chosen.size(0),
                    " experts there are");
  if (!limit || chosen.size(0) == 0) return;
  const int64_t most = chosen.max().item<int64_t>();
  TORCH_CHECK_VALUE(most <= *limit, "an expert has ", most, " choices, more than its ", *limit,
                    " rows: drop the overflow before routing_map");
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> routing_map(
    const at::Tensor& experts, int64_t num_experts, std::optional<int64_t> pad_rows_per_expert,
    std::optional<int64_t> num_rows, std::optional<int64_t> max_rows) {
  check_index("experts", experts, 2);
  TORCH_CHECK_VALUE(num_experts >= 0, "num_experts must not be negative: ", num_experts);
  TORCH_CHECK_VALUE(!pad_rows_per_expert || *pad_rows_per_expert >= 0,
                    "pad_rows_per_expert must not be negative: ", *pad_rows_per_expert);
  TORCH_CHECK_VALUE(!max_rows || *max_rows >= 0, "max_rows must not be negative: ", *max_rows);
  const auto experts_2d = experts.contiguous();
  const int64_t choices = experts.numel();
  const auto chunk_counts = count_in_chunks(experts_2d, num_experts);
  const int64_t chunks = chunk_counts.size(1), chunk_size = chunk_size_of(experts_2d);
  if (experts.is_cpu()) {
    const auto chosen = chunk_counts.slice(0, 0, num_experts).sum(1);
    const int64_t counted = chunk_counts.sum().item<int64_t>();
    check_counts(chosen, choices - counted, max_rows ? std::nullopt : pad_rows_per_expert);
    const int64_t named = chosen.sum().item<int64_t>();
    TORCH_CHECK_VALUE(!num_rows || named == *num_rows, "num_rows is ", num_rows.value_or(0),
                      ", but ", named, " choices name an expert");
  }
  auto counts = experts.new_empty({num_experts});
  auto first_row = experts.new_empty({num_experts, chunks});
  launch(experts, FindRows{.chunk_counts = chunk_counts.const_data_ptr<int64_t>(),
                           .counts = counts.mutable_data_ptr<int64_t>(),
                           .first_row = first_row.mutable_data_ptr<int64_t>(),
                           .num_experts = num_experts,
                           .pad_rows_per_expert = pad_rows_per_expert.value_or(-1),
                           .max_rows = max_rows.value_or(choices),
                           .chunks = chunks});
  const int64_t all_rows = pad_rows_per_expert ? num_experts * *pad_rows_per_expert
                           : max_rows          ? *max_rows
                           : num_rows          ? *num_rows
                                               : counts.sum().item<int64_t>();

  auto slots = experts.new_full({all_rows}, -1);
  auto rows = at::full_like(experts_2d, -1);
  launch(experts, PlaceChoices{.experts = experts_2d.const_data_ptr<int64_t>(),
                               .first_row = first_row.const_data_ptr<int64_t>(),
                               .slots = slots.mutable_data_ptr<int64_t>(),
                               .rows = rows.mutable_data_ptr<int64_t>(),
                               .choices = choices,
                               .num_experts = num_experts,
                               .num_rows = all_rows,
                               .pad_rows_per_expert = pad_rows_per_expert.value_or(-1),
                               .chunks = chunks,
                               .chunk_size = chunk_size});
  return {slots, rows, counts};
}

}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR(
    "routing_map",
    "(Tensor experts, SymInt num_experts, SymInt? pad_rows_per_expert, "
    "SymInt? num_rows, SymInt? max_rows) -> (Tensor slots, Tensor rows, Tensor counts)",
    moe_parallel::routing_map)
