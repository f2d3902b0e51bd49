// The rows of one message: a token as one expert sees it, C = x W_down of that choice if it is
// sent, and the prob of the choice.
//
//     [ x | C | unused | prob ]         `width` elements of x's type
//
// The prob is in the type of sums, in the last bytes of the row.
#include <ATen/ops/empty.h>

#include <optional>
#include <tuple>

#include "permute_tensors.h"

namespace moe_parallel {
namespace {

// Views of the columns of packed rows.
class MessageRows {
 public:
  MessageRows(const at::Tensor& packed, int64_t token_width, int64_t rank)
      : packed_(packed), token_width_(token_width), rank_(rank) {
    const auto prob_bytes = static_cast<int64_t>(c10::elementSize(sum_type_of(packed)));
    const int64_t bytes = bytes_of_element(packed), row_bytes = packed.size(1) * bytes;
    TORCH_CHECK_VALUE(
        (token_width + rank) * bytes + prob_bytes <= row_bytes && row_bytes % prob_bytes == 0,
        "a packed row of ", packed.size(1), " elements cannot hold ", token_width, " of x, ", rank,
        " of C and a prob");
  }

  at::Tensor x() const { return packed_.narrow(1, 0, token_width_); }
  at::Tensor c() const { return packed_.narrow(1, token_width_, rank_); }
  at::Tensor prob() const {
    const auto probs = packed_.view(sum_type_of(packed_));
    return probs.narrow(1, probs.size(1) - 1, 1);
  }

 private:
  const at::Tensor& packed_;
  int64_t token_width_, rank_;
};

void check_message(const at::Tensor& x, const at::Tensor& slots, const at::Tensor& rows) {
  check_dim("x", x, 2);
  check_index("slots", slots, 1);
  check_index("rows", rows, 2);
  check_together(x, {slots, rows});
  scalar_type_of("x", x);
}

}  // namespace

at::Tensor pack_rows(const at::Tensor& x, const at::Tensor& probs, const at::Tensor& slots,
                     const at::Tensor& rows, const std::optional<at::Tensor>& c_TKR,
                     int64_t width) {
  check_message(x, slots, rows);
  check_together(x, {probs});
  TORCH_CHECK_VALUE(rows.size(0) == x.size(0), "x has ", x.size(0), " tokens, the row map ",
                    rows.size(0));
  check_sizes("probs", probs, rows.sizes());
  TORCH_CHECK_TYPE(probs.scalar_type() == sum_type_of(x), "probs must be ", sum_type_of(x),
                   " for tokens of ", x.scalar_type(), ", not ", probs.scalar_type());
  const int64_t rank = c_TKR ? c_TKR->size(-1) : 0;
  if (c_TKR) {
    check_sizes("c_TKR", *c_TKR, {rows.size(0), rows.size(1), rank});
    check_same_type("c_TKR", *c_TKR, "x", x);
    check_together(x, {*c_TKR});
  }
  const auto tokens = with_dense_rows(x), slots_1d = slots.contiguous(), map = rows.contiguous();
  auto packed = x.new_empty({slots.size(0), width});
  const MessageRows to(packed, x.size(1), rank);
  gather_rows_out(to.x(), tokens, slots_1d, rows.size(1), map.const_data_ptr<int64_t>());
  if (c_TKR) gather_rows_out(to.c(), with_dense_rows(c_TKR->flatten(0, 1)), slots_1d, 1);
  gather_rows_out(to.prob(), probs.contiguous().view({-1, 1}), slots_1d, 1);
  return packed;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> pack_rows_backward(const at::Tensor& dpacked,
                                                                  const at::Tensor& slots,
                                                                  const at::Tensor& rows,
                                                                  int64_t token_width,
                                                                  int64_t rank) {
  check_message(dpacked, slots, rows);
  TORCH_CHECK_VALUE(slots.size(0) == dpacked.size(0), "there are ", dpacked.size(0),
                    " packed rows, the row map has ", slots.size(0));
  const auto given = dpacked.contiguous(), map = rows.contiguous();
  const MessageRows from(given, token_width, rank);
  const int64_t tokens = rows.size(0), choices = rows.size(1);
  auto dx = dpacked.new_empty({tokens, token_width});
  sum_rows_out(dx, from.x(), map);
  auto dprobs = at::empty({tokens * choices, 1}, dpacked.options().dtype(sum_type_of(dpacked)));
  gather_rows_out(dprobs, from.prob(), map, 1);
  auto dc = dpacked.new_empty({rank > 0 ? tokens * choices : 0, rank});
  if (rank > 0) gather_rows_out(dc, from.c(), map, 1);
  return {dx, dprobs.view(rows.sizes()), dc.view({rank > 0 ? tokens : 0, choices, rank})};
}

}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR("pack_rows",
                      "(Tensor x, Tensor probs, Tensor slots, Tensor rows, Tensor? c_TKR, "
                      "int width) -> Tensor",
                      moe_parallel::pack_rows)
MOE_PARALLEL_OPERATOR("pack_rows_backward",
                      "(Tensor dpacked, Tensor slots, Tensor rows, int token_width, int rank) "
                      "-> (Tensor dx, Tensor dprobs, Tensor dc_TKR)",
                      moe_parallel::pack_rows_backward)
