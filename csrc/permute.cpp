#include "permute_tensors.h"

namespace moe_parallel {

at::Tensor permute(const at::Tensor& x, const at::Tensor& slots, const at::Tensor& rows) {
  check_dim("x", x, 2);
  check_index("slots", slots, 1);
  check_index("rows", rows, 2);
  check_together(x, {slots, rows});
  scalar_type_of("x", x);
  TORCH_CHECK_VALUE(rows.size(0) == x.size(0), "x has ", x.size(0), " tokens, the row map ",
                    rows.size(0));

  const auto x_rows = with_dense_rows(x);
  const auto slots_1d = slots.contiguous();
  const auto rows_2d = rows.contiguous();
  auto y = x.new_empty({slots.size(0), x.size(1)});
  gather_rows_out(y, x_rows, slots_1d, rows.size(1), rows_2d.const_data_ptr<int64_t>());
  return y;
}

}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR("permute", "(Tensor x, Tensor slots, Tensor rows) -> Tensor",
                      moe_parallel::permute)
