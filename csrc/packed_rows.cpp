// The rows of one message: a token, and the experts of the receiving rank that compute it.
//
//     [ x | unused | experts | probs ]         `width` elements of x's type
//
// The experts are int16, -1 for an empty place, and the probs of the type of sums, in the last bytes
// of the row, where they begin at a multiple of their size.
#include <ATen/core/Tensor.h>

#include <tuple>

#include "permute_tensors.h"

namespace moe_parallel {
namespace {

// Views of the columns of packed rows.
class MessageRows {
 public:
  MessageRows(const at::Tensor& packed, int64_t token_width, int64_t places)
      : packed_(packed), token_width_(token_width), places_(places) {
    const int64_t row_bytes = packed.size(1) * bytes_of_element(packed);
    TORCH_CHECK_VALUE(
        places >= 0 && row_bytes % prob_bytes() == 0 &&
            token_width * bytes_of_element(packed) + expert_bytes() + places * prob_bytes() <=
                row_bytes,
        "a packed row of ", packed.size(1), " elements cannot hold ", token_width, " of x and ",
        places, " experts with their probs");
  }

  at::Tensor x() const { return packed_.narrow(1, 0, token_width_); }
  at::Tensor probs() const {
    const auto values = packed_.view(sum_type_of(packed_));
    return values.narrow(1, values.size(1) - places_, places_);
  }
  at::Tensor experts() const {
    const auto numbers = packed_.view(at::kShort);
    const int64_t behind = (expert_bytes() + places_ * prob_bytes()) / 2;
    return numbers.narrow(1, numbers.size(1) - behind, places_);
  }

 private:
  int64_t prob_bytes() const {
    return static_cast<int64_t>(c10::elementSize(sum_type_of(packed_)));
  }
  // With what is unused up to the probs.
  int64_t expert_bytes() const {
    return (places_ * 2 + prob_bytes() - 1) / prob_bytes() * prob_bytes();
  }

  const at::Tensor& packed_;
  int64_t token_width_, places_;
};

}  // namespace

at::Tensor pack_rows(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& probs,
                     const at::Tensor& slots, const at::Tensor& rows, int64_t width) {
  check_dim("x", x, 2);
  check_index("slots", slots, 1);
  check_index("rows", rows, 2);
  check_dim("probs", probs, 2);
  check_together(x, {slots, rows, experts, probs});
  scalar_type_of("x", x);
  TORCH_CHECK_VALUE(rows.size(0) == x.size(0), "x has ", x.size(0), " tokens, the row map ",
                    rows.size(0));
  check_sizes("probs", probs, {slots.size(0), probs.size(1)});
  check_sizes("experts", experts, probs.sizes());
  TORCH_CHECK_TYPE(probs.scalar_type() == sum_type_of(x), "probs must be ", sum_type_of(x),
                   " for tokens of ", x.scalar_type(), ", not ", probs.scalar_type());
  const auto tokens = with_dense_rows(x), slots_1d = slots.contiguous(), map = rows.contiguous();
  auto packed = x.new_empty({slots.size(0), width});
  const MessageRows to(packed, x.size(1), probs.size(1));
  gather_rows_out(to.x(), tokens, slots_1d, rows.size(1), map.const_data_ptr<int64_t>());
  to.experts().copy_(experts);
  to.probs().copy_(probs);
  return packed;
}

std::tuple<at::Tensor, at::Tensor> pack_rows_backward(const at::Tensor& dpacked,
                                                      const at::Tensor& rows, int64_t token_width,
                                                      int64_t places) {
  check_dim("dpacked", dpacked, 2);
  check_index("rows", rows, 2);
  check_together(dpacked, {rows});
  scalar_type_of("dpacked", dpacked);
  const auto given = dpacked.contiguous(), map = rows.contiguous();
  const MessageRows from(given, token_width, places);
  auto dx = dpacked.new_empty({rows.size(0), token_width});
  sum_rows_out(dx, from.x(), map);
  return {dx, from.probs().clone()};
}

}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR("pack_rows",
                      "(Tensor x, Tensor experts, Tensor probs, Tensor slots, Tensor rows, "
                      "int width) -> Tensor",
                      moe_parallel::pack_rows)
MOE_PARALLEL_OPERATOR("pack_rows_backward",
                      "(Tensor dpacked, Tensor rows, int token_width, int places) "
                      "-> (Tensor dx, Tensor dprobs)",
                      moe_parallel::pack_rows_backward)
