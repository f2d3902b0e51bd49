// The rows of one message: a token, and the experts of the receiving rank that compute it.
//
//     [ x | unused | experts | probs ]         `width` elements of x's type
//
// The experts are int16, -1 in an empty place, and the probs of the type of sums, in the last bytes
// of the row, where they begin at a multiple of their size.
#include "packed_rows.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <tuple>

#include "permute_tensors.h"
#include "routing_map_counts.h"

namespace moe_parallel {
namespace {

// `packed` and the others must outlive it.
RowEnds row_ends(const at::Tensor& packed, const at::Tensor& numbers, const at::Tensor& slots,
                 int64_t token_width, int64_t experts_there, int64_t places) {
  const int64_t bytes = bytes_of_element(packed), row_bytes = packed.size(1) * bytes;
  const auto prob_bytes = static_cast<int64_t>(c10::elementSize(sum_type_of(packed)));
  const int64_t probs_at = row_bytes - places * prob_bytes;
  const int64_t experts_at = probs_at - (places * 2 + prob_bytes - 1) / prob_bytes * prob_bytes;
  TORCH_CHECK_VALUE(experts_there > 0 && experts_there <= 32767,
                    "a destination must have 1 to 32767 experts, not ", experts_there);
  TORCH_CHECK_VALUE(places >= 0 && row_bytes % prob_bytes == 0 && token_width * bytes <= experts_at,
                    "a packed row of ", packed.size(1), " elements cannot hold ", token_width,
                    " of x and ", places, " experts with their probs");
  return {.numbers = numbers.const_data_ptr<int64_t>(),
          .slots = slots.const_data_ptr<int64_t>(),
          .packed = packed.data_ptr(),
          .rows = slots.size(0),
          .choices = numbers.size(1),
          .experts_there = experts_there,
          .places = places,
          .row_bytes = row_bytes,
          .experts_at = experts_at,
          .probs_at = probs_at,
          .is_double = packed.scalar_type() == at::kDouble};
}

void check_map(const at::Tensor& x, const at::Tensor& numbers, const at::Tensor& slots,
               const at::Tensor& rows) {
  check_dim("x", x, 2);
  check_index("numbers", numbers, 2);
  check_index("slots", slots, 1);
  check_sizes("rows", rows, numbers.sizes());
  check_together(x, {numbers, slots, rows});
  scalar_type_of("x", x);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> visits(const at::Tensor& numbers, int64_t experts_there,
                                          int64_t destinations) {
  check_index("numbers", numbers, 2);
  TORCH_CHECK_VALUE(experts_there > 0, "a destination must have experts, not ", experts_there);
  const auto numbers_2d = numbers.contiguous();
  auto to = at::empty_like(numbers_2d), visited = at::empty_like(numbers_2d);
  launch(numbers, FindVisits{.numbers = numbers_2d.const_data_ptr<int64_t>(),
                             .destinations = to.mutable_data_ptr<int64_t>(),
                             .visits = visited.mutable_data_ptr<int64_t>(),
                             .tokens = numbers.size(0),
                             .choices = numbers.size(1),
                             .experts_there = experts_there});
  const auto count = [&](const at::Tensor& choices) {
    return count_in_chunks(choices, destinations).slice(0, 0, destinations).sum(1);
  };
  return {visited, at::stack({count(visited), count(to)}, 1)};
}

at::Tensor pack_rows(const at::Tensor& x, const at::Tensor& probs, const at::Tensor& numbers,
                     const at::Tensor& slots, const at::Tensor& rows, int64_t experts_there,
                     int64_t places, int64_t width) {
  check_map(x, numbers, slots, rows);
  check_dim("probs", probs, 2);
  check_together(x, {probs});
  TORCH_CHECK_VALUE(numbers.size(0) == x.size(0) && probs.size(0) == x.size(0), "x has ", x.size(0),
                    " tokens, numbers ", numbers.size(0), ", probs ", probs.size(0));
  TORCH_CHECK_VALUE(probs.size(1) > 0 && numbers.size(1) % probs.size(1) == 0, "there are ",
                    numbers.size(1), " numbers and ", probs.size(1), " probs of a token");
  TORCH_CHECK_TYPE(probs.scalar_type() == sum_type_of(x), "probs must be ", sum_type_of(x),
                   " for tokens of ", x.scalar_type(), ", not ", probs.scalar_type());
  const auto tokens = with_dense_rows(x), given = probs.contiguous();
  const auto chosen = numbers.contiguous(), slots_1d = slots.contiguous(), map = rows.contiguous();
  auto packed = x.new_empty({slots.size(0), width});
  const auto ends = row_ends(packed, chosen, slots_1d, x.size(1), experts_there, places);
  gather_rows_out(packed.narrow(1, 0, x.size(1)), tokens, slots_1d, rows.size(1),
                  map.const_data_ptr<int64_t>());
  launch(x, WriteEnds{.ends = ends,
                      .probs = given.const_data_ptr(),
                      .shards = numbers.size(1) / probs.size(1)});
  return packed;
}

std::tuple<at::Tensor, at::Tensor> pack_rows_backward(const at::Tensor& dpacked,
                                                      const at::Tensor& numbers,
                                                      const at::Tensor& slots,
                                                      const at::Tensor& rows, int64_t token_width,
                                                      int64_t num_probs, int64_t experts_there,
                                                      int64_t places) {
  check_map(dpacked, numbers, slots, rows);
  TORCH_CHECK_VALUE(slots.size(0) == dpacked.size(0), "there are ", dpacked.size(0),
                    " packed rows, the row map has ", slots.size(0));
  const auto d = dpacked.contiguous(), chosen = numbers.contiguous();
  const auto slots_1d = slots.contiguous(), map = rows.contiguous();
  auto dx = d.new_empty({numbers.size(0), token_width});
  auto dprobs = at::zeros(numbers.sizes(), d.options().dtype(sum_type_of(d)));
  const auto ends = row_ends(d, chosen, slots_1d, token_width, experts_there, places);
  sum_rows_out(dx, d.narrow(1, 0, token_width), map);
  launch(d, ReadEnds{.ends = ends, .probs = dprobs.data_ptr()});
  const int64_t shards = numbers.size(1) / num_probs;
  if (shards > 1) dprobs = dprobs.view({numbers.size(0), num_probs, shards}).sum(2);
  return {dx, dprobs};
}

}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR("visits",
                      "(Tensor numbers, int experts_there, int destinations) "
                      "-> (Tensor visited, Tensor counts)",
                      moe_parallel::visits)
MOE_PARALLEL_OPERATOR("pack_rows",
                      "(Tensor x, Tensor probs, Tensor numbers, Tensor slots, Tensor rows, "
                      "int experts_there, int places, int width) -> Tensor",
                      moe_parallel::pack_rows)
MOE_PARALLEL_OPERATOR("pack_rows_backward",
                      "(Tensor dpacked, Tensor numbers, Tensor slots, Tensor rows, "
                      "int token_width, int num_probs, int experts_there, int places) "
                      "-> (Tensor dx, Tensor dprobs)",
                      moe_parallel::pack_rows_backward)
