#include "routing_map.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "launch.h"

namespace moe_parallel {
namespace {

constexpr int64_t kCudaChunk = 512;

// The CPU's counts say how large the outputs are, so CUDA waits here for its own.
at::Tensor chosen_per_expert(const at::Tensor& chunk_counts, int64_t choices) {
  const auto chosen = chunk_counts.sum(1).cpu();
  TORCH_CHECK_VALUE(chosen.sum().item<int64_t>() == choices, "an expert was chosen beyond the ",
                    chosen.size(0) - 1, " experts there are");
  return chosen.slice(0, 0, chosen.size(0) - 1).contiguous();
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> routing_map(const at::Tensor& experts,
                                                           int64_t num_experts,
                                                           std::optional<int64_t> rows_per_expert) {
  check_index("experts", experts, 2);
  const auto experts_2d = experts.contiguous();
  const int64_t choices = experts.numel();
  const int64_t chunk_size = experts.is_cuda() ? kCudaChunk : std::max<int64_t>(choices, 1);
  const int64_t chunks = std::max<int64_t>((choices + chunk_size - 1) / chunk_size, 1);

  auto chunk_counts = experts.new_zeros({num_experts + 1, chunks});
  launch(experts, CountChoices{.experts = experts_2d.const_data_ptr<int64_t>(),
                               .counts = chunk_counts.mutable_data_ptr<int64_t>(),
                               .choices = choices,
                               .num_experts = num_experts,
                               .chunks = chunks,
                               .chunk_size = chunk_size});
  const auto chosen = chosen_per_expert(chunk_counts, choices);
  auto counts = chosen;
  if (rows_per_expert) {
    counts = at::full_like(chosen, *rows_per_expert);
    const int64_t most = num_experts > 0 ? chosen.max().item<int64_t>() : 0;
    TORCH_CHECK_VALUE(most <= *rows_per_expert, "an expert has ", most, " choices, more than its ",
                      *rows_per_expert, " rows: drop the overflow before routing_map");
  }

  const auto expert_counts = chunk_counts.slice(0, 0, num_experts);
  const auto first_row_of_expert = (counts.cumsum(0) - counts).to(experts.device());
  const auto first_row =
      (expert_counts.cumsum(1) - expert_counts + first_row_of_expert.unsqueeze(1)).contiguous();
  auto slots = experts.new_full({counts.sum().item<int64_t>()}, -1);
  auto rows = at::full_like(experts_2d, -1);
  launch(experts, PlaceChoices{.experts = experts_2d.const_data_ptr<int64_t>(),
                               .first_row = first_row.const_data_ptr<int64_t>(),
                               .slots = slots.mutable_data_ptr<int64_t>(),
                               .rows = rows.mutable_data_ptr<int64_t>(),
                               .choices = choices,
                               .num_experts = num_experts,
                               .chunks = chunks,
                               .chunk_size = chunk_size});
  return {slots, rows, counts};
}

}  // namespace moe_parallel

MOE_PARALLEL_IMPLEMENT("routing_map", moe_parallel::routing_map)
