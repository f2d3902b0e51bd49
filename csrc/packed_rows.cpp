// The rows of one message: a token as one expert sees it, C = x W_down of that choice if it is
// sent, and the prob of the choice.
//
//     [ x | C | unused | prob ]         `width` elements of x's type
//
// The prob is in the type of sums, in the last bytes of the row.
#include <ATen/ops/empty.h>

#include <optional>
#include <tuple>

#include "launch.h"
#include "permute.h"
#include "unpermute.h"

namespace moe_parallel {
namespace {

// The columns of rows `stride` bytes apart.
struct Columns {
  char* first;
  int64_t bytes;
  int64_t stride;
};

class MessageRows {
 public:
  MessageRows(const at::Tensor& packed, int64_t token_width, int64_t rank)
      : data_(static_cast<char*>(packed.data_ptr())),
        stride_(packed.stride(0) * bytes_of_element(packed)),
        row_bytes_(packed.size(1) * bytes_of_element(packed)),
        element_(bytes_of_element(packed)),
        x_bytes_(token_width * element_),
        c_bytes_(rank * element_),
        prob_bytes_(static_cast<int64_t>(c10::elementSize(sum_type_of(packed)))) {
    TORCH_CHECK_VALUE(
        x_bytes_ + c_bytes_ + prob_bytes_ <= row_bytes_ && row_bytes_ % prob_bytes_ == 0,
        "a packed row of ", packed.size(1), " elements cannot hold ", token_width, " of x, ", rank,
        " of C and a prob");
  }

  Columns x() const { return {data_, x_bytes_, stride_}; }
  Columns c() const { return {data_ + x_bytes_, c_bytes_, stride_}; }
  Columns prob() const { return {data_ + row_bytes_ - prob_bytes_, prob_bytes_, stride_}; }
  int64_t stride_in_elements() const { return stride_ / element_; }

 private:
  char* data_;
  int64_t stride_, row_bytes_, element_, x_bytes_, c_bytes_, prob_bytes_;
};

// A matrix with dense rows.
Columns columns_of(const at::Tensor& t) {
  const int64_t bytes = bytes_of_element(t);
  return {static_cast<char*>(t.data_ptr()), t.size(1) * bytes, t.stride(0) * bytes};
}

// to[n] = from[index[n] / choices], or zeros if the index is negative.
void gather(const at::Tensor& where, Columns from, int64_t tokens, int64_t choices,
            const at::Tensor& index, Columns to, const int64_t* row_of_choice = nullptr) {
  launch(where, Permute{.x = from.first,
                        .slots = index.const_data_ptr<int64_t>(),
                        .y = to.first,
                        .tokens = tokens,
                        .choices = choices,
                        .rows = index.numel(),
                        .row_bytes = to.bytes,
                        .x_stride = from.stride,
                        .y_stride = to.stride,
                        .row_of_choice = row_of_choice});
}

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
  gather(x, columns_of(tokens), x.size(0), rows.size(1), slots_1d, to.x(),
         map.const_data_ptr<int64_t>());
  if (c_TKR) {
    const auto c = with_dense_rows(c_TKR->flatten(0, 1));
    gather(x, columns_of(c), c.size(0), 1, slots_1d, to.c());
  }
  const auto flat_probs = probs.contiguous().view({-1, 1});
  gather(x, columns_of(flat_probs), flat_probs.size(0), 1, slots_1d, to.prob());
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
  const auto given = with_dense_rows(dpacked), map = rows.contiguous();
  const MessageRows from(given, token_width, rank);
  const int64_t tokens = rows.size(0), choices = rows.size(1);
  auto dx = dpacked.new_empty({tokens, token_width});
  launch(dpacked, Unpermute{.type = scalar_type_of("dpacked", dpacked),
                            .y = from.x().first,
                            .rows = map.const_data_ptr<int64_t>(),
                            .probs = nullptr,
                            .out = dx.mutable_data_ptr(),
                            .tokens = tokens,
                            .choices = choices,
                            .num_rows = dpacked.size(0),
                            .width = token_width,
                            .y_stride = from.stride_in_elements(),
                            .out_stride = token_width});
  auto dprobs = at::empty({tokens * choices, 1}, dpacked.options().dtype(sum_type_of(dpacked)));
  gather(dpacked, from.prob(), dpacked.size(0), 1, map, columns_of(dprobs));
  auto dc = dpacked.new_empty({rank > 0 ? tokens * choices : 0, rank});
  if (rank > 0) gather(dpacked, from.c(), dpacked.size(0), 1, map, columns_of(dc));
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
