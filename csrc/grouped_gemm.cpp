// Matrix products of consecutive groups of rows: one ATen product a group, so BLAS or oneDNN on
// the CPU and cuBLAS on CUDA.
#include <ATen/ops/mm.h>

#include "launch.h"

namespace moe_parallel {
namespace {

void check_groups(const char* name, const at::Tensor& x, const at::Tensor& counts) {
  check_dim(name, x, 2);
  check_index("counts", counts, 1);
  TORCH_CHECK_VALUE(counts.is_cpu(), "counts must be on the CPU, not on ", counts.device());
  TORCH_CHECK_VALUE(counts.numel() == 0 || counts.min().item<int64_t>() >= 0,
                    "counts must not be negative: ", counts);
  TORCH_CHECK_VALUE(counts.sum().item<int64_t>() == x.size(0), "counts sum to ",
                    counts.sum().item<int64_t>(), ", but ", name, " has ", x.size(0), " rows");
}

// body(e, first, rows) for every group, the empty ones too.
template <class Body>
void for_each_group(const at::Tensor& counts, const Body& body) {
  const auto counts_1d = counts.contiguous();
  const int64_t* count = counts_1d.const_data_ptr<int64_t>();
  int64_t first = 0;
  for (int64_t e = 0; e < counts.size(0); ++e) {
    body(e, first, count[e]);
    first += count[e];
  }
}

}  // namespace

// y[rows of e] = x[rows of e] w[e]
at::Tensor grouped_gemm(const at::Tensor& x, const at::Tensor& w, const at::Tensor& counts) {
  check_groups("x", x, counts);
  check_dim("w", w, 3);
  TORCH_CHECK_VALUE(w.size(0) == counts.size(0), "w has ", w.size(0), " experts, counts ",
                    counts.size(0));
  TORCH_CHECK_VALUE(w.size(1) == x.size(1), "x has ", x.size(1), " columns, but w takes ",
                    w.size(1));

  const auto x_rows = x.contiguous();
  auto y = x.new_empty({x.size(0), w.size(2)});
  for_each_group(counts, [&](int64_t e, int64_t first, int64_t rows) {
    if (rows == 0) return;
    auto y_group = y.narrow(0, first, rows);
    at::mm_out(y_group, x_rows.narrow(0, first, rows), w.select(0, e));
  });
  return y;
}

// w[e] = x[rows of e]^T y[rows of e], zeros for an empty group
at::Tensor grouped_outer(const at::Tensor& x, const at::Tensor& y, const at::Tensor& counts) {
  check_groups("x", x, counts);
  check_groups("y", y, counts);

  const auto x_rows = x.contiguous();
  const auto y_rows = y.contiguous();
  auto w = x.new_empty({counts.size(0), x.size(1), y.size(1)});
  for_each_group(counts, [&](int64_t e, int64_t first, int64_t rows) {
    auto w_expert = w.select(0, e);
    if (rows == 0) {
      w_expert.zero_();
      return;
    }
    at::mm_out(w_expert, x_rows.narrow(0, first, rows).t(), y_rows.narrow(0, first, rows));
  });
  return w;
}

}  // namespace moe_parallel

MOE_PARALLEL_IMPLEMENT("grouped_gemm", moe_parallel::grouped_gemm)
MOE_PARALLEL_IMPLEMENT("grouped_outer", moe_parallel::grouped_outer)
