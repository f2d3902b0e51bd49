#include "fused_gemm.h"

#include <ATen/ops/empty.h>

#include <atomic>
#include <optional>
#include <variant>

#include "launch.h"

namespace moe_parallel {
namespace {

std::atomic<Fusing> fusing{Fusing::kWhereFaster};

// Returns nullopt if neither the rows nor the columns are dense.
std::optional<GroupedMatrix> matrices_of(const at::Tensor& w) {
  if (!w.defined()) return GroupedMatrix{};
  const bool by_rows = w.stride(2) == 1, by_columns = !by_rows && w.stride(1) == 1;
  if (!by_rows && !by_columns) return std::nullopt;
  return GroupedMatrix{.data = w.const_data_ptr(),
                       .stride = w.stride(by_columns ? 2 : 1),
                       .group_stride = w.stride(0),
                       .by_columns = by_columns,
                       .is_cut = false};
}

std::optional<FusedProduct> product_of(Operands operands, int64_t rows) {
  const auto& w = operands.begin()->first;
  FusedProduct product{.type = scalar_type_of("w", w),
                       .parts = {},
                       .num_parts = 0,
                       .offsets = nullptr,
                       .groups = w.size(0),
                       .rows = rows,
                       .columns = w.size(2),
                       .columns_per_matrix = w.size(2)};
  for (const auto& part : operands) {
    const auto first = matrices_of(part.first), second = matrices_of(part.second);
    if (!first || !second) return std::nullopt;
    product.parts[product.num_parts++] = {part.a, *first, *second, part.first.size(1)};
  }
  return product;
}

#ifdef MOE_PARALLEL_CUDA
bool may_fuse(const FusedProduct& product, const Epilogue& epilogue) {
  const auto can = [&](const auto& rows) { return can_fuse(product, rows); };
  return std::visit(can, epilogue) && (fusing == Fusing::kAlways || is_faster_fused(epilogue));
}
#endif

// `counts`: the number of rows of each group; undefined if one group has all rows.
bool run(FusedProduct product, const at::Tensor& where, const at::Tensor& counts,
         const Epilogue& epilogue) {
  if (fusing == Fusing::kNever) return false;
#ifdef MOE_PARALLEL_CUDA
  if (where.is_cuda()) {
    const c10::cuda::CUDAGuard guard(where.device());
    if (!may_fuse(product, epilogue)) return false;
    const auto stream = at::cuda::getCurrentCUDAStream();
    at::Tensor counts_1d, offsets;
    if (counts.defined()) {
      counts_1d = counts.contiguous();
      offsets = at::empty({product.groups + 1}, counts.options());
      run_on_cuda(GroupOffsets{.counts = counts_1d.const_data_ptr<int64_t>(),
                               .offsets = offsets.mutable_data_ptr<int64_t>(),
                               .groups = product.groups,
                               .rows = product.rows},
                  stream);
      product.offsets = offsets.const_data_ptr<int64_t>();
    }
    std::visit([&](const auto& rows) { run_on_cuda(product, rows, stream); }, epilogue);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return true;
  }
#endif
  // On the CPU, each block of ExpertRows has one expert.
  TORCH_INTERNAL_ASSERT(where.is_cpu() && (!counts.defined() || counts.numel() == 1));
  return run_on_cpu(product, epilogue);
}

}  // namespace

GatheredRows rows_of(const at::Tensor& x) {
  return {.data = x.const_data_ptr(),
          .slots = nullptr,
          .choices = 1,
          .source_rows = x.size(0),
          .stride = x.stride(0)};
}

// Weak, so that no compiler inlines it: tests/cuda_host replaces it with the kernels of csrc/cuda.
__attribute__((weak)) bool run_on_cpu(const FusedProduct&, const Epilogue&) { return false; }

bool fused_gemm(Operands operands, const at::Tensor& counts, int64_t rows,
                const Epilogue& epilogue) {
  const auto product = product_of(operands, rows);
  return product && run(*product, operands.begin()->first, counts, epilogue);
}

bool fused_products(const at::Tensor& x, const at::Tensor& w, const Epilogue& epilogue) {
  if (x.stride(1) != 1) return false;
  auto product = product_of({{rows_of(x), w, w}}, x.size(0));
  if (!product) return false;
  product->groups = 1;
  product->columns = w.size(0) * w.size(2);
  return run(*product, x, at::Tensor(), epilogue);
}

Fusing set_fusing(Fusing wanted) { return fusing.exchange(wanted); }

}  // namespace moe_parallel
