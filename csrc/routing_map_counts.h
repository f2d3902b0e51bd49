#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "launch.h"
#include "routing_map.h"

namespace moe_parallel {

// Choices are counted in chunks: on CUDA one for each block, on a CPU a single one.
inline int64_t chunk_size_of(const at::Tensor& choices) {
  return choices.is_cuda() ? 512 : std::max<int64_t>(choices.numel(), 1);
}

// [num_experts + 1, chunks]: see CountChoices. `choices` is contiguous.
inline at::Tensor count_in_chunks(const at::Tensor& choices, int64_t num_experts) {
  const int64_t size = chunk_size_of(choices);
  const int64_t chunks = std::max<int64_t>((choices.numel() + size - 1) / size, 1);
  auto counts = choices.new_zeros({num_experts + 1, chunks});
  launch(choices, CountChoices{.experts = choices.const_data_ptr<int64_t>(),
                               .counts = counts.mutable_data_ptr<int64_t>(),
                               .choices = choices.numel(),
                               .num_experts = num_experts,
                               .chunks = chunks,
                               .chunk_size = size});
  return counts;
}

}  // namespace moe_parallel
