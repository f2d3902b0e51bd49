// Grouped products. On the CPU, each group is one ATen product, which BLAS or oneDNN computes. On
// CUDA, the same loop runs if the kernels leave the product to cuBLAS. It then waits for the
// counts.
#include "grouped_gemm.h"

#include <ATen/core/Formatting.h>

#include "launch.h"
#include "product.h"

#ifdef MOE_PARALLEL_CUDA
#include "cuda/grouped_gemm.h"
#endif

namespace moe_parallel {
namespace {

// Calls body(e, first, rows) for every group, including the empty groups.
template <class Body>
void for_each_group(const at::Tensor& counts, const Body& body) {
  const auto on_host = counts.cpu().contiguous();
  const int64_t* count = on_host.const_data_ptr<int64_t>();
  int64_t first = 0;
  for (int64_t e = 0; e < on_host.size(0); ++e) {
    body(e, first, count[e]);
    first += count[e];
  }
}

}  // namespace

void check_groups(const char* name, const at::Tensor& x, const at::Tensor& counts) {
  check_dim(name, x, 2);
  check_index("counts", counts, 1);
  check_together(x, {counts});
  if (!counts.is_cpu()) return;  // the kernels that read the values check them
  TORCH_CHECK_VALUE(counts.numel() == 0 || counts.min().item<int64_t>() >= 0,
                    "counts must not be negative: ", counts);
  TORCH_CHECK_VALUE(counts.sum().item<int64_t>() <= x.size(0), "counts sum to ",
                    counts.sum().item<int64_t>(), ", but ", name, " has ", x.size(0), " rows");
}

void grouped_gemm_out(at::Tensor& out, const at::Tensor& x, const at::Tensor& w,
                      const at::Tensor& counts, bool accumulate) {
#ifdef MOE_PARALLEL_CUDA
  if (x.is_cuda() && grouped_gemm_on_cuda(out, x, w, counts, accumulate)) return;
#endif
  for_each_group(counts, [&](int64_t e, int64_t first, int64_t rows) {
    if (rows == 0) return;
    auto out_group = out.narrow(0, first, rows);
    product_out(out_group, x.narrow(0, first, rows), w.select(0, e), accumulate);
  });
}

void grouped_outer_out(at::Tensor out, const at::Tensor& x, const at::Tensor& y,
                       const at::Tensor& counts, bool accumulate, TransposedRows& memory) {
  if (out.stride(1) == 1 && out.stride(2) != 1) {
    return grouped_outer_out(out.transpose(1, 2), y, x, counts, accumulate, memory);
  }
#ifdef MOE_PARALLEL_CUDA
  if (x.is_cuda() && grouped_outer_on_cuda(out, x, y, counts, accumulate)) return;
#endif
  const bool is_wide = out.scalar_type() != x.scalar_type();  // such a product reads x^T as a view
  for_each_group(counts, [&](int64_t e, int64_t first, int64_t rows) {
    auto out_group = out.select(0, e);
    const auto x_group = x.narrow(0, first, rows);
    if (rows > 0) {
      product_out(out_group, is_wide ? x_group.t() : memory.of(x_group), y.narrow(0, first, rows),
                  accumulate);
    } else if (!accumulate) {
      out_group.zero_();
    }
  });
}

namespace {

// y[rows of e] = x[rows of e] w[e]
at::Tensor grouped_gemm(const at::Tensor& x, const at::Tensor& w, const at::Tensor& counts) {
  check_groups("x", x, counts);
  check_dim("w", w, 3);
  check_together(x, {w});
  check_same_type("w", w, "x", x);
  TORCH_CHECK_VALUE(w.size(0) == counts.size(0), "w has ", w.size(0), " experts, counts ",
                    counts.size(0));
  TORCH_CHECK_VALUE(w.size(1) == x.size(1), "x has ", x.size(1), " columns, but w takes ",
                    w.size(1));
  auto y = x.new_empty({x.size(0), w.size(2)});
  grouped_gemm_out(y, x.contiguous(), w, counts);
  return y;
}

// w[e] = x[rows of e]^T y[rows of e], or zeros for an empty group
at::Tensor grouped_outer(const at::Tensor& x, const at::Tensor& y, const at::Tensor& counts) {
  check_groups("x", x, counts);
  check_groups("y", y, counts);
  check_together(x, {y});
  check_same_type("y", y, "x", x);
  auto w = x.new_empty({counts.size(0), x.size(1), y.size(1)});
  TransposedRows memory;
  grouped_outer_out(w, x.contiguous(), y.contiguous(), counts, /*accumulate=*/false, memory);
  return w;
}

// total[e] += x[rows of e]^T y[rows of e]
void grouped_outer_add(at::Tensor& total, const at::Tensor& x, const at::Tensor& y,
                       const at::Tensor& counts) {
  check_groups("x", x, counts);
  check_groups("y", y, counts);
  check_dim("total", total, 3);
  check_together(x, {y, total});
  check_same_type("y", y, "x", x);
  check_sizes("total", total, {counts.size(0), x.size(1), y.size(1)});
  TransposedRows memory;
  grouped_outer_out(total, x.contiguous(), y.contiguous(), counts, /*accumulate=*/true, memory);
}

}  // namespace
}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR("grouped_gemm", "(Tensor x, Tensor w, Tensor counts) -> Tensor",
                      moe_parallel::grouped_gemm)
MOE_PARALLEL_OPERATOR("grouped_outer", "(Tensor x, Tensor y, Tensor counts) -> Tensor",
                      moe_parallel::grouped_outer)
MOE_PARALLEL_OPERATOR("grouped_outer_add",
                      "(Tensor(a!) total, Tensor x, Tensor y, Tensor counts) -> ()",
                      moe_parallel::grouped_outer_add)
